"""Blocks: an ordered list of block handles. Knows no pool: what a handle means is the pool's affair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import overload

import numpy as np

from poolweave.types import BlockId, UInt64Array


class Blocks:
    """Handles in token order, as a uint64 array. A value: it owns no references, whoever was given it does.

    `owner` is the epoch of the pool they came from (0: not known), so that a pool can refuse blocks of another one.
    Indexing gives a BlockId, slicing and `+` give Blocks.
    """

    __slots__ = ("array", "owner")

    def __init__(self, array: UInt64Array, owner: int = 0) -> None:
        self.array = array
        self.owner = owner

    @classmethod
    def of(cls, handles: object, owner: int = 0) -> Blocks:
        """From any sequence of handles. Raises TypeError for what is no integer, OverflowError for negative ones."""
        array = np.asarray(handles)
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"handles are integers, got {array.dtype}")
        if array.dtype.kind == "i" and array.size and array.min() < 0:
            raise OverflowError("handles are not negative")
        return cls(np.ascontiguousarray(array.reshape(-1), dtype=np.uint64), owner)

    @classmethod
    def empty(cls) -> Blocks:
        return cls(np.empty(0, np.uint64))

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[BlockId]:
        return (BlockId(handle) for handle in self.array.tolist())

    @overload
    def __getitem__(self, index: int) -> BlockId: ...
    @overload
    def __getitem__(self, index: slice) -> Blocks: ...
    def __getitem__(self, index: int | slice) -> BlockId | Blocks:
        if isinstance(index, slice):
            return Blocks(np.ascontiguousarray(self.array[index]), self.owner)
        return BlockId(int(self.array[index]))

    def __add__(self, other: Blocks) -> Blocks:
        if not isinstance(other, Blocks):
            return NotImplemented
        if self.owner and other.owner and self.owner != other.owner:
            raise ValueError("blocks of two pools cannot be joined")
        return Blocks(np.concatenate((self.array, other.array)), self.owner or other.owner)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Blocks):
            return NotImplemented
        return np.array_equal(self.array, other.array) and (self.owner == other.owner or 0 in (self.owner, other.owner))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(f"{handle & 0xFFFFFFFF}.{handle >> 32}" for handle in self.array[:6].tolist())
        return f"Blocks({len(self)}: {shown}{', ...' if len(self) > 6 else ''})"
