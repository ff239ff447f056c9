"""Reclaimer: makes room in a tier by demoting or dropping historical blocks, least recently used first.

Pinned and active blocks are never touched, and nothing is evicted for a request that cannot be met. Source: MemServe
§4.2 (swap), design of the eviction pass: at most one per request.
"""

from __future__ import annotations

import numpy as np

from poolweave.mempool.guests import GUESTS
from poolweave.mempool.quotas import NOBODY
from poolweave.mempool.shared_tier import SharedTierMemory
from poolweave.mempool.space import BOTH, DRAM, HBM, BlockSpace
from poolweave.types import UInt64Array


class Reclaimer:
    """Works on a BlockSpace whose lock the caller holds. Has no state of its own."""

    def __init__(self, space: BlockSpace) -> None:
        self._space = space

    def make_room(self, num_blocks: int, mask: int, tenant: int = NOBODY) -> bool:
        """Room for `num_blocks` in the tiers of `mask`, with one eviction pass at most. False when it cannot be.

        A tenant that would pass its quota gives up history of its own, others none for it.
        """
        if tenant != NOBODY and not self.make_quota_room(num_blocks, mask, tenant):
            return False
        if tenant != NOBODY:
            return self._make_room_between(num_blocks, mask, tenant)
        free, evictable = self.supply(mask)
        if free < num_blocks and self.extend(num_blocks - free, mask):
            free, evictable = self.supply(mask)
        if free >= num_blocks:
            return True
        mirrors = self._space.table.counts(DRAM).mirrors if mask >> DRAM & 1 else 0
        if free + evictable + mirrors < num_blocks:
            return self._drop_orphans(num_blocks, mask)
        free += self.drop_mirrors(min(mirrors, num_blocks - free))
        if free >= num_blocks:
            return True
        needed = num_blocks - free
        if mask == 1 << HBM and self._space.has_dram:
            needed -= self.demote(needed)
        self.drop(needed, mask, "evicted")
        return self.supply(mask)[0] >= num_blocks

    def _drop_orphans(self, num_blocks: int, mask: int) -> bool:
        """Room by giving up history in pages that nobody else has a use for."""
        space = self._space
        memory = space.tiers[HBM]
        if not isinstance(memory, SharedTierMemory) or mask >> HBM & 1 == 0 or not memory.has_orphans():
            return False
        return self.drop(num_blocks, 1 << GUESTS, "evicted") > 0 and self.make_room(num_blocks, mask)

    def _make_room_between(self, num_blocks: int, mask: int, tenant: int) -> bool:
        """The same where the tenant's quota is room enough: only tiers are cleared that its quota has more room in."""
        table = self._space.table
        open_mask, closed = mask, 0
        for number in (HBM, DRAM):
            quota = table.tenant_room(tenant, 1 << number)
            if mask >> number & 1 and quota <= table.counts(number).free:
                open_mask, closed = open_mask & ~(1 << number), closed + quota
        if table.alloc_room(mask, tenant) < num_blocks and open_mask:
            self.make_room(num_blocks - closed, open_mask)
        return table.alloc_room(mask, tenant) >= num_blocks

    def make_room_for(self, handles: UInt64Array, number: int) -> int | None:
        """Room in one tier for blocks that come from the other. -> None, or the tenant whose quota or history (NOBODY:
        the pool's) does not suffice
        """
        if self._space.tenants is not None:
            tenants = np.empty(len(handles), np.uint16)
            self._space.table.tenants_of(handles, tenants)
            for tenant, count in zip(*np.unique(tenants, return_counts=True), strict=True):
                if tenant != NOBODY and not self.make_quota_room(int(count), 1 << number, int(tenant), arriving=False):
                    return int(tenant)
        return None if self.make_room(len(handles), 1 << number) else NOBODY

    def make_quota_room(self, num_blocks: int, mask: int, tenant: int, *, arriving: bool = True) -> bool:
        """Room under a tenant's limits, out of its own history; `arriving` blocks count in its total."""
        in_tiers, in_all = self._over_quota(num_blocks, mask, tenant, arriving)
        if in_tiers > 0 and mask >> DRAM & 1:
            in_tiers -= self.drop_mirrors(in_tiers, tenant)
        if in_tiers <= 0 and in_all <= 0:
            return True
        historical = self._space.table.tenant(tenant).historical
        if in_tiers > sum(historical[n] for n in (HBM, DRAM) if mask >> n & 1) or in_all > sum(historical):
            return False
        book = self._space.tenants
        assert book is not None
        ns = book.namespace(tenant)
        if mask == 1 << HBM and self._space.has_dram and in_all <= 0:
            in_tiers -= self.demote(in_tiers, ns)
        self.drop(in_tiers, mask, "over_quota", tenant_of=ns)
        self.drop(self._over_quota(num_blocks, mask, tenant, arriving)[1], BOTH, "over_quota", tenant_of=ns)
        return max(self._over_quota(num_blocks, mask, tenant, arriving)) <= 0

    def _over_quota(self, num_blocks: int, mask: int, tenant: int, arriving: bool) -> tuple[int, int]:
        """Blocks too many in the tiers of `mask`, and in all."""
        counts = self._space.table.tenant(tenant)
        room = sum(counts.limit[n] - counts.used[n] for n in (HBM, DRAM) if mask >> n & 1)
        return num_blocks - room, counts.blocks + num_blocks * arriving - counts.block_limit

    def extend(self, num_blocks: int, mask: int) -> bool:
        """Where memory comes on demand, get some more before anything is evicted."""
        space = self._space
        grown = space.handed is not None and space.handed.collect(reap=True) > 0
        for number, memory in space.tiers.items():
            if mask >> number & 1 and memory.extend(num_blocks):
                space.table.set_limit(number, memory.num_slots)
                grown = True
        return grown

    def supply(self, mask: int) -> tuple[int, int]:
        """Blocks free and evictable in the tiers of `mask`."""
        counts = [self._space.table.counts(number) for number in (HBM, DRAM) if mask >> number & 1]
        return sum(c.free for c in counts), sum(c.historical for c in counts)

    def demote(self, num_blocks: int, tenant_of: int | None = None) -> int:
        """Move the coldest historical blocks of HBM to DRAM, dropping older ones there. -> how many moved

        Of one tenant's namespace, or of all; never more than a tenant may have in DRAM.
        """
        space = self._space
        victims = space.index.coldest(num_blocks, filter=space.table.evictable(1 << HBM), tenant_of=tenant_of)
        mirrored = len(victims)
        victims = space.demote_mirrored(victims)
        mirrored -= len(victims)
        if mirrored:
            space.counters["demoted"] += mirrored
            space.counters["demoted_without_copy"] += mirrored
        return mirrored + self._write_back(victims, tenant_of)

    def _write_back(self, victims: UInt64Array, tenant_of: int | None) -> int:
        """Copy those of the victims that DRAM has room for, or can make."""
        space = self._space
        if space.tenants is not None:
            fits = np.empty(len(victims), np.uint8)
            space.table.fit_quotas(victims, DRAM, fits)
            if tenant_of is not None and not fits.all():
                self.drop(int(np.count_nonzero(fits == 0)), 1 << DRAM, "over_quota", hidden=False, tenant_of=tenant_of)
                victims = self._still_there(victims)
                fits = np.empty(len(victims), np.uint8)
                space.table.fit_quotas(victims, DRAM, fits)
            victims = victims[fits.astype(bool)]
        if not len(victims):
            return 0
        room = space.table.counts(DRAM).free
        if room < len(victims) and self.extend(len(victims) - room, 1 << DRAM):
            room = space.table.counts(DRAM).free
        if room < len(victims):
            room += self.drop_mirrors(len(victims) - room)
        if room < len(victims):
            self.drop(len(victims) - room, 1 << DRAM, "evicted", hidden=False)
            victims = victims[: space.table.counts(DRAM).free]
            victims = self._still_there(victims)
        if not space.move(victims, DRAM):
            return 0
        space.counters["demoted"] += len(victims)
        return len(victims)

    def drop_mirrors(self, num_blocks: int, tenant: int = NOBODY) -> int:
        """Give up second copies in DRAM, of one tenant's blocks or of all. -> how many"""
        dropped = self._space.table.drop_mirrors(num_blocks, 0, tenant) if num_blocks > 0 else 0
        if dropped:
            self._space.counters["mirrors_dropped"] += dropped
        return dropped

    def drop(
        self, num_blocks: int, mask: int, reason: str, *, hidden: bool = True, tenant_of: int | None = None
    ) -> int:  # fmt: skip
        """Let the index give up `num_blocks` of the tiers of `mask`. -> how many it gave up there

        Only leaves go, so a block of the tier may hide behind a leaf of another: with `hidden` such leaves go as well.
        """
        if num_blocks <= 0:
            return 0
        space = self._space
        given = space.index.evict(num_blocks, filter=space.table.evictable(mask), tenant_of=tenant_of)
        space.drop(given, reason)
        dropped = len(given)
        while hidden and dropped < num_blocks and self.supply(mask)[1]:
            given = space.index.evict(
                num_blocks - dropped, filter=space.table.evictable(BOTH | 1 << GUESTS), tenant_of=tenant_of
            )  # fmt: skip
            if not len(given):
                break
            tiers, slots = space.locate(given)
            space.drop(given, reason)
            own = slots < space.guest_row
            dropped += int(np.count_nonzero(own & ((tiers & np.uint8(mask)) != 0)))
        return dropped

    def _still_there(self, handles: UInt64Array) -> UInt64Array:
        """Those that the last drop did not take along."""
        is_evictable = self._space.table.is_evictable
        return np.array([h for h in handles.tolist() if is_evictable(h, 1 << HBM)], np.uint64)
