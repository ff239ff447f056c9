"""Weights of a Hugging Face directory, tensor by tensor, as the native core takes them. Needs no torch.

What is read is checked where it is read: there, of its shape, of a float type and finite. Values are those that
transformers loads in the same dtype.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from poolweave.crosspool_engine.model_shape import ModelShape
from poolweave.crosspool_engine.models.safetensors_file import Array, TensorPlace, read_places
from poolweave.errors import ConfigError, ModelNotFound

_DTYPES = ("float32", "bfloat16")
_CHUNK = 1 << 20  # numbers converted at a time, so that a conversion holds no third copy


class Checkpoint:
    """`config` is the directory's config.json, `shape` what it says. `dtype`: of the matrices that are given out.

    `read_numbers` counts what was read. Raises ModelNotFound for a directory without config.json or safetensors
    weights, ConfigError.
    """

    def __init__(self, path: str | Path, dtype: str = "float32") -> None:
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype {dtype!r} is none of {sorted(_DTYPES)}", setting="dtype", value=dtype)
        self.path = Path(path)
        self.dtype = dtype
        self.shape = ModelShape.from_directory(path)
        self.config: dict[str, Any] = json.loads((self.path / "config.json").read_text())
        self.read_numbers = 0
        self._places = _places(self.path)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def matrix(self, name: str, shape: tuple[int, ...], *, rows: range | None = None, wide: bool = False) -> Array:
        """The weight `name`, whose whole is of `shape`; of `rows` of its first axis only, when given.

        float32, or bfloat16 as uint16; `wide`: float32 in any case. Raises ConfigError naming it.
        """
        return self._convert(name, self._read(name, shape, rows), wide or self.dtype == "float32")

    def vector(self, name: str, size: int, *, rows: range | None = None, exact: bool = False) -> Array:
        """A bias, norm weight or other row, as float32, rounded to `dtype` before unless `exact`."""
        read = self._read(name, (size,), rows)
        if self.dtype == "bfloat16" and not exact:
            return _widen(self._convert(name, read, wide=False))
        return self._convert(name, read, wide=True)

    def _read(self, name: str, shape: tuple[int, ...], rows: range | None) -> Array:
        place = self._places.get(name)
        if place is None:
            raise ConfigError(f"{name} is missing from {self.path}", setting=name, value=str(self.path))
        if place.shape != shape:
            raise ConfigError(
                f"{name} must be {_text(shape)}, is {_text(place.shape)}", setting=name, value=place.shape
            )
        wanted = range(shape[0]) if rows is None else rows
        try:
            numbers = place.read(wanted.start, len(wanted))
        except ConfigError as error:
            raise ConfigError(f"{name} {error}", setting=name) from error
        self.read_numbers += numbers.size
        return numbers

    def _convert(self, name: str, numbers: Array, wide: bool) -> Array:
        """Checked and in the type asked for; the same array where nothing is to do."""
        whole = numbers.dtype == (np.float32 if wide else np.uint16)
        into = numbers if whole else np.empty(numbers.shape, np.float32 if wide else np.uint16)
        source, target = numbers.reshape(-1), into.reshape(-1)
        for first in range(0, source.size, _CHUNK):
            piece = source[first : first + _CHUNK]
            if not _finite(piece):
                raise ConfigError(f"{name} holds NaN or infinity", setting=name)
            if not whole:
                exact = _widen(piece) if piece.dtype == np.uint16 else piece.astype(np.float32, copy=False)
                target[first : first + _CHUNK] = exact if wide else _narrow(exact)
        return into


def _places(path: Path) -> dict[str, TensorPlace]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        if not (path / "model.safetensors").is_file():
            raise ModelNotFound(f"no model.safetensors, nor an index of several, in {path}", path=str(path))
        return read_places(path / "model.safetensors")
    try:
        owners: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files: Sequence[str] = sorted(set(owners.values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{index} is no index of weights: {error!r}", setting="model", value=str(path)) from error
    return {name: place for file in files for name, place in read_places(path / file).items()}


def _finite(numbers: Array) -> bool:
    if numbers.dtype == np.uint16:
        return not bool(((numbers & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(numbers).all())


def _widen(numbers: Array) -> Array:
    """bfloat16 to float32."""
    return (numbers.astype(np.uint32) << 16).view(np.float32)


def _narrow(numbers: Array) -> Array:
    """float32 to bfloat16, to the nearest, to even between two."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
