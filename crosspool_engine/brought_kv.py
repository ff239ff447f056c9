"""BroughtKv: KV of a request's first blocks where it lies, to be read once, when the request gets its pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from poolweave.types import Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class BroughtKv:
    """Block i is `memory[rows[i]]`, `[layers, parts, block_tokens, heads, dim]`: a pool's view and rows of it.

    Whoever asks keeps the blocks where they are, and as they are, until the request's first news.
    """

    memory: npt.NDArray[Any]
    rows: Int32Array

    @classmethod
    def whole(cls, kv: npt.NDArray[Any]) -> BroughtKv:
        """All blocks of an array."""
        return cls(kv, np.arange(len(kv), dtype=np.int32))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.rows), *self.memory.shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.memory.dtype

    def blocks(self, first: int, heads: range) -> Iterator[npt.NDArray[Any]]:
        """Each block from `first` on with these heads alone; in place where they are all and lie together."""
        for row in self.rows[first:].tolist():
            yield np.ascontiguousarray(self.memory[row][..., heads.start : heads.stop, :])
