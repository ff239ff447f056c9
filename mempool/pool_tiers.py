"""PoolTiers: the calls of MemPool that move blocks between tiers and change what tiers hold."""

from __future__ import annotations

import numpy as np

from poolweave.errors import ConfigError
from poolweave.mempool.pool_parts import BlocksLike, PoolParts
from poolweave.mempool.refused import refuse_count
from poolweave.mempool.space import DRAM, HBM
from poolweave.types import Tier, parse_bytes


class PoolTiers(PoolParts):
    """A half of MemPool."""

    def swap_out(self, num_blocks: int) -> int:
        """Move up to `num_blocks` historical blocks from HBM to DRAM, the coldest first. -> how many moved

        Where DRAM is full, its own oldest are dropped for them. Handles stay. Raises ConfigError without a DRAM tier.
        """
        refuse_count(num_blocks)
        if not self._space.has_dram:
            raise ConfigError("this pool has no DRAM tier; create it with dram=...", setting="dram", value=0)
        with self._space.lock:
            moved = self._reclaimer.demote(num_blocks)
            self._space.counters["swapped_out"] += moved
        self._allocator.released(moved)
        return moved

    def swap_in(self, blocks: BlocksLike) -> int:
        """Bring those of `blocks` that lie in DRAM into HBM, all or none. Handles stay, rows change. -> how many moved

        Raises OutOfBlocks when HBM has no room even after eviction.
        """
        handles = self._handles(blocks)
        with self._space.lock:
            self._table.retain(handles)
            try:
                away = np.unique(handles[self._space.locate(handles)[0] == Tier.DRAM.value])
                while not self._space.move(away, HBM):
                    tenant = self._reclaimer.make_room_for(away, HBM)
                    if tenant is not None:
                        raise self._allocator.refusal(len(away), Tier.HBM, tenant)
                self._space.counters["swapped_in"] += len(away)
            finally:
                available = self._table.free(handles)
        self._allocator.released(available)
        return len(away)

    def resize(self, *, hbm: int | str | None = None, dram: int | str | None = None) -> None:
        """Change tiers while in use, up to the maximum they were made with. Growing is done at once.

        Shrinking evicts and moves historical blocks, never live ones: while more live than the new size holds, nothing
        is allocated, and what lies above it goes back as it is freed. Raises ConfigError.
        """
        sizes = ((HBM, "hbm", hbm), (DRAM, "dram", dram))
        self._resizer.resize({number: parse_bytes(size, name) for number, name, size in sizes if size is not None})
        self._allocator.released(1)

    def trim(self) -> None:
        """Give pages above the highest block in use back to the arenas that tiers share with others."""
        self._resizer.trim()
