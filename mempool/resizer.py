"""Resizer: grows tiers at once and shrinks them as blocks allow. A live block is never taken."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from poolweave.errors import ConfigError
from poolweave.mempool.reclaim import Reclaimer
from poolweave.mempool.shared_tier import SharedTierMemory
from poolweave.mempool.space import DRAM, HBM, BlockSpace
from poolweave.mempool.tiers import TIERS


class Resizer:
    """`draining` holds the tiers (by number) whose shrinking waits for blocks to be freed."""

    def __init__(self, space: BlockSpace, reclaimer: Reclaimer) -> None:
        self._space = space
        self._reclaimer = reclaimer
        self.draining: set[int] = set()

    def resize(self, sizes: Mapping[int, int]) -> None:
        """Give tiers, by number, room for so many bytes. Raises ConfigError for any out of range; then none changed."""
        with self._space.lock:
            wanted = {number: self._slots_for(number, nbytes) for number, nbytes in sizes.items()}
            for number, slots in wanted.items():
                self._resize(number, slots)

    def _slots_for(self, number: int, nbytes: int) -> int:
        if number not in self._space.tiers:
            name = str(TIERS[number].name).lower()
            raise ConfigError(f"this pool has no {name} tier; create it with {name}=...", setting=name, value=nbytes)
        return self._space.tiers[number].slots_for(nbytes)

    def _resize(self, number: int, slots: int) -> None:
        space = self._space
        memory = space.tiers[number]
        if slots < memory.num_slots:
            self._shrink(number, slots)
            memory.cap_slots = slots
            return
        memory.grow(slots)
        space.table.set_limit(number, memory.num_slots)
        if not space.table.counts(number).overhang:
            self.draining.discard(number)

    def trim(self) -> None:
        """Give the memory above the highest block in use back to the arenas that tiers share with others."""
        space = self._space
        with space.lock:
            for number, memory in space.tiers.items():
                end = space.table.used_end(number)
                if isinstance(memory, SharedTierMemory) and end < memory.num_slots:
                    self._shrink(number, end)

    def _shrink(self, number: int, num_slots: int) -> None:
        self._space.table.set_limit(number, num_slots)
        self.draining.add(number)
        self.drain(number)

    def drain_all(self) -> None:
        """Blocks were freed: go on with what is under way."""
        with self._space.lock:
            for number in tuple(self.draining):
                self.drain(number)

    def drain(self, number: int) -> None:
        """Evict down to the limit, move historical blocks below it, return the memory of what is empty above."""
        space = self._space
        counts = space.table.counts(number)
        if number == DRAM and counts.mirrors:
            space.table.drop_mirrors(counts.mirrors, counts.limit)
            counts = space.table.counts(number)
            space.table.drop_mirrors(max(0, counts.used - counts.limit))
            counts = space.table.counts(number)
        excess = min(counts.used - counts.limit, counts.historical)
        if excess > 0:
            if number == HBM and DRAM in space.tiers:
                excess -= self._reclaimer.demote(excess)
            self._reclaimer.drop(excess, 1 << number, "evicted")
        counts = space.table.counts(number)
        vacant = counts.limit - (counts.used - counts.overhang)
        movable = space.table.evictable_overhang(number)[:vacant]
        space.move(np.array(movable, np.uint64), number)
        occupied = np.array(space.table.overhang(number), np.uint32)
        space.tiers[number].shrink(counts.limit, occupied)
        if not len(occupied):
            self.draining.discard(number)
