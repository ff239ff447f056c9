"""Values that every room shares: tiers, token ids, byte sizes. Knows no pool, index or transport."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import Any, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from poolweave.errors import ConfigError

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[Any]"
Int32Array: TypeAlias = "npt.NDArray[np.int32]"
UInt64Array: TypeAlias = "npt.NDArray[np.uint64]"
BlockId = NewType("BlockId", int)  # a handle: generation << 32 | id

_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_BINARY = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_MAX_TOKEN = 2**31 - 1
_INT32 = np.dtype(np.int32)


class Tier(enum.Flag):
    """A kind of memory. `Tier.HBM | Tier.DRAM` allows either, HBM first."""

    HBM = 1
    DRAM = 2


class Role(str, enum.Enum):
    """Which phase of a request an instance computes."""

    __hash__ = str.__hash__  # as equality; enum's own runs Python code at each look-up

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


def as_tokens(tokens: TokenIds) -> Int32Array:
    """`tokens` as a contiguous int32 array, without a copy when it already is one.

    Takes lists, tuples, integer numpy arrays, array.array and torch tensors. Raises TypeError for floats and
    bools, ValueError for ids outside [0, 2**31) and for more than one dimension.
    """
    if isinstance(tokens, np.ndarray) and (tokens.dtype is _INT32 or tokens.dtype == _INT32) and tokens.ndim == 1:
        array = np.ascontiguousarray(tokens)
        if array.size and array[array.argmin()] < 0:  # array.min() takes five times as long
            raise ValueError(f"token id {int(array.min())} is negative; ids run from 0 to {_MAX_TOKEN}")
        return array
    if tokens is None or isinstance(tokens, (str, bytes)):
        raise TypeError(f"tokens are a sequence of token ids, got {tokens!r:.60}")
    if isinstance(tokens, (list, tuple)) and any(isinstance(t, (bool, np.bool_)) for t in tokens):
        raise TypeError("token ids must be integers, got bool")
    raw = np.asarray(tokens)
    if raw.size == 0:
        return np.empty(0, np.int32)
    if raw.ndim != 1:
        raise ValueError(f"token ids must be one-dimensional, got shape {raw.shape}")
    if raw.dtype.kind not in "iu":
        raise TypeError(f"token ids must be integers, got {raw.dtype}")
    low, high = int(raw.min()), int(raw.max())
    if low < 0 or high > _MAX_TOKEN:
        raise ValueError(f"token ids run from 0 to {_MAX_TOKEN}, got {low if low < 0 else high}")
    return np.ascontiguousarray(raw, dtype=np.int32)


def require_timeout(timeout: Any) -> None:
    """Raises ConfigError for what is no wait: seconds that are not negative, or None for ever."""
    if timeout is None or (isinstance(timeout, (int, float)) and timeout >= 0):  # NaN is not
        return
    raise ConfigError(
        f"timeout is seconds, not negative, or None, got {timeout!r}", setting="timeout", value=repr(timeout)
    )


def byte_unit(nbytes: float) -> tuple[str, int]:
    """The unit in which this many bytes are read best, and the bytes that one of it has."""
    return next(((name, size) for name, size in _BINARY if nbytes >= size), ("B", 1))


def format_bytes(nbytes: float) -> str:
    """`"1.50 GiB"`, `"3.00 KiB"`, `"17 B"`: in the largest unit of which there is one."""
    name, size = byte_unit(nbytes)
    return f"{nbytes / size:.{2 if size > 1 else 0}f} {name}"


def parse_bytes(size: int | str, setting: str) -> int:
    """`"2GiB"`, `"512 MB"` or a plain int as bytes. Raises ConfigError naming `setting`."""
    if isinstance(size, int) and not isinstance(size, bool):
        if size >= 0:
            return size
        raise ConfigError(f"{setting} must not be negative, got {size}", setting=setting, value=size)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size) if isinstance(size, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{setting}={size!r} is no size; write bytes or e.g. '2GiB'", setting=setting, value=size)
    return int(float(match[1]) * _UNITS[match[2].lower()])
