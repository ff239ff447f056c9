"""PoolParts: what the halves of MemPool share: the pool's parts, and how callers name blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from poolweave.errors import UnknownBlock
from poolweave.mempool._native import BlockTable
from poolweave.mempool.allocator import Allocator
from poolweave.mempool.blocks import Blocks
from poolweave.mempool.links import Links
from poolweave.mempool.reclaim import Reclaimer
from poolweave.mempool.resizer import Resizer
from poolweave.mempool.space import BlockSpace
from poolweave.types import UInt64Array

BlocksLike: TypeAlias = "Blocks | UInt64Array | Sequence[int]"
_UINT64 = np.dtype(np.uint64)


class PoolParts:
    """Set by MemPool, which alone makes them."""

    _epoch: int
    _space: BlockSpace
    _table: BlockTable
    _reclaimer: Reclaimer
    _resizer: Resizer
    _allocator: Allocator
    _links: Links

    def _handles(self, blocks: BlocksLike) -> UInt64Array:
        if not isinstance(blocks, Blocks):
            if isinstance(blocks, np.ndarray) and blocks.dtype == _UINT64 and blocks.ndim == 1:
                return blocks
            if not isinstance(blocks, (Sequence, np.ndarray)) or isinstance(blocks, (str, bytes)):
                raise TypeError(f"blocks are Blocks, or their handles as integers, got {blocks!r:.60}")
            try:
                return Blocks.of(blocks).array
            except OverflowError:
                raise UnknownBlock("a block's handle is an integer of 64 bits, never negative") from None
        if blocks.owner != self._epoch and blocks.owner:
            raise UnknownBlock("these blocks are another pool's; send them with transfer()")
        return blocks.array
