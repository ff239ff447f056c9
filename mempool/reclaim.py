"""Reclaimer: makes room in a tier by demoting or dropping historical blocks, least recently used first.

Pinned and active blocks are never touched, and nothing is evicted for a request that cannot be met. Source: MemServe
§4.2 (swap), design of the eviction pass: at most one per request.
"""

from __future__ import annotations

import numpy as np

from poolweave.mempool.space import BOTH, DRAM, HBM, BlockSpace
from poolweave.types import UInt64Array


class Reclaimer:
    """Works on a BlockSpace whose lock the caller holds. Has no state of its own."""

    def __init__(self, space: BlockSpace) -> None:
        self._space = space

    def make_room(self, num_blocks: int, mask: int) -> bool:
        """Room for `num_blocks` in the tiers of `mask`, with one eviction pass at most. False when it cannot be."""
        free, evictable = self.supply(mask)
        if free < num_blocks and self._extend(num_blocks - free, mask):
            free, evictable = self.supply(mask)
        if free >= num_blocks:
            return True
        if free + evictable < num_blocks:
            return False
        needed = num_blocks - free
        if mask == 1 << HBM and self._space.has_dram:
            needed -= self.demote(needed)
        self.drop(needed, mask, "evicted")
        return self.supply(mask)[0] >= num_blocks

    def _extend(self, num_blocks: int, mask: int) -> bool:
        """Where memory comes on demand, get some more before anything is evicted."""
        space = self._space
        grown = False
        for number, memory in space.tiers.items():
            if mask >> number & 1 and memory.extend(num_blocks):
                space.table.set_limit(number, memory.num_slots)
                grown = True
        return grown

    def supply(self, mask: int) -> tuple[int, int]:
        """Blocks free and evictable in the tiers of `mask`."""
        counts = [self._space.table.counts(number) for number in (HBM, DRAM) if mask >> number & 1]
        return sum(c.free for c in counts), sum(c.historical for c in counts)

    def demote(self, num_blocks: int) -> int:
        """Move the coldest historical blocks of HBM to DRAM, dropping older ones there. -> how many moved"""
        space = self._space
        victims = space.index.coldest(num_blocks, filter=space.table.evictable(1 << HBM))
        if not len(victims):
            return 0
        room = space.table.counts(DRAM).free
        if room < len(victims) and self._extend(len(victims) - room, 1 << DRAM):
            room = space.table.counts(DRAM).free
        if room < len(victims):
            self.drop(len(victims) - room, 1 << DRAM, "evicted", hidden=False)
            victims = victims[: space.table.counts(DRAM).free]
            victims = self._still_there(victims)
        if not space.move(victims, DRAM):
            return 0
        space.counters["demoted"] += len(victims)
        return len(victims)

    def drop(self, num_blocks: int, mask: int, reason: str, *, hidden: bool = True) -> int:
        """Let the index give up `num_blocks` of the tiers of `mask`. -> how many it gave up there

        Only leaves go, so a block of the tier may hide behind a leaf of another: with `hidden` such leaves go as well.
        """
        if num_blocks <= 0:
            return 0
        space = self._space
        given = space.index.evict(num_blocks, filter=space.table.evictable(mask))
        space.drop(given, reason)
        dropped = len(given)
        while hidden and dropped < num_blocks and self.supply(mask)[1]:
            given = space.index.evict(num_blocks - dropped, filter=space.table.evictable(BOTH))
            if not len(given):
                break
            tiers, _ = space.locate(given)
            space.drop(given, reason)
            dropped += int(np.count_nonzero(tiers & np.uint8(mask)))
        return dropped

    def _still_there(self, handles: UInt64Array) -> UInt64Array:
        """Those that the last drop did not take along."""
        is_evictable = self._space.table.is_evictable
        return np.array([h for h in handles.tolist() if is_evictable(h, 1 << HBM)], np.uint64)
