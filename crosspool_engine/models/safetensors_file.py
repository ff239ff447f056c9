"""A safetensors file: which tensors it holds, and each of them read when asked for. Knows no model.

Read by plain reads into memory of their own, never mapped: what a half does not ask for costs nothing, and what it has
packed goes back at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from poolweave.errors import ConfigError

Array: TypeAlias = "npt.NDArray[Any]"

_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
}
_MOST_HEADER = 100 << 20  # the format's own limit


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor lies. `kind`: the format's name of its element type; `offset` in the file."""

    file: Path
    kind: str
    shape: tuple[int, ...]
    offset: int

    def read(self, first: int, count: int) -> Array:
        """Entries [first, first + count) of its first axis, bfloat16 as uint16. Raises ConfigError.

        For a dtype that weights cannot have here, and a file that ends before them.
        """
        dtype = _DTYPES.get(self.kind)
        if dtype is None:
            raise ConfigError(f"is {self.kind}; weights are read from F32, F16 or BF16", setting="dtype")
        each = int(np.prod(self.shape[1:], dtype=np.int64))
        at = self.offset + first * each * dtype.itemsize
        numbers: Array = np.fromfile(self.file, dtype, count * each, offset=at)
        if len(numbers) != count * each:
            raise ConfigError(f"ends after {len(numbers)} of {count * each} numbers in {self.file}", setting="model")
        return numbers.reshape(count, *self.shape[1:])


def read_places(file: Path) -> dict[str, TensorPlace]:
    """By name. Raises ConfigError for a file that is no safetensors file, naming it."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > _MOST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length))
        return {
            name: TensorPlace(file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{file} is no safetensors file: {error!r}", setting="model", value=str(file)) from error
