"""Allocator: gives blocks out and takes references back, and lets callers wait their turn."""

from __future__ import annotations

import math
import time

import numpy as np

from poolweave.errors import AllocTimeout, ConfigError, OutOfBlocks, QuotaExceeded
from poolweave.mempool.guests import GUESTS
from poolweave.mempool.quotas import NO_LIMIT, NOBODY
from poolweave.mempool.reclaim import Reclaimer
from poolweave.mempool.refused import refuse_count
from poolweave.mempool.resizer import Resizer
from poolweave.mempool.space import HBM, BlockSpace
from poolweave.mempool.waiters import TaskGate, ThreadGate, Turn, WaitQueue
from poolweave.types import Tier, UInt64Array

_LOOK_S = 0.02  # between two looks at what other processes gave back


class Allocator:
    """All calls are all or nothing and thread-safe. Waiters are served in order of arrival; alloc without a timeout
    does not stand in line. `tenant` is whose quota pays.
    """

    def __init__(self, space: BlockSpace, reclaimer: Reclaimer, resizer: Resizer) -> None:
        self._space = space
        self._reclaimer = reclaimer
        self._resizer = resizer
        self.waiters = WaitQueue()

    def alloc(self, num_blocks: int, tier: Tier, tenant: int = NOBODY) -> UInt64Array:
        """Raises OutOfBlocks, QuotaExceeded. Evicts when it must."""
        self.require_possible(num_blocks, tier, tenant)
        handles = self._try(num_blocks, tier, tenant)
        if handles is None:
            raise self.refusal(num_blocks, tier, tenant)
        return handles

    def alloc_wait(self, num_blocks: int, tier: Tier, timeout: float, tenant: int = NOBODY) -> UInt64Array:
        """Waits up to `timeout` seconds without the GIL. Raises AllocTimeout; OutOfBlocks for what can never fit."""
        self.require_possible(num_blocks, tier, tenant)
        deadline = time.monotonic() + timeout
        gate = ThreadGate()
        turn = self.waiters.enter(gate.wake)
        try:
            while True:
                handles = self._take_turn(turn, num_blocks, tier, tenant)
                if handles is not None:
                    return handles
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self.out_of_blocks(num_blocks, tier, AllocTimeout, f" after {timeout} s")
                gate.wait(self._patience(left))
        finally:
            self.waiters.leave(turn)

    async def alloc_async(
        self, num_blocks: int, tier: Tier, timeout: float | None, tenant: int = NOBODY
    ) -> UInt64Array:  # fmt: skip
        """The same for a task: other tasks run meanwhile. Cancelling it gives its place up."""
        self.require_possible(num_blocks, tier, tenant)
        deadline = None if timeout is None else time.monotonic() + timeout
        gate = TaskGate()
        turn = self.waiters.enter(gate.wake)
        try:
            while True:
                handles = self._take_turn(turn, num_blocks, tier, tenant)
                if handles is not None:
                    return handles
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise self.out_of_blocks(num_blocks, tier, AllocTimeout, f" after {timeout} s")
                await gate.wait(None if left is None and self._space.handed is None else self._patience(left))
        finally:
            self.waiters.leave(turn)

    def free(self, handles: UInt64Array) -> None:
        """Drop one reference on each. Raises UnknownBlock, StaleHandle."""
        self.released(self._space.table.free(handles))

    def released(self, available: int) -> None:
        """`available` blocks became free or evictable: whoever waits for that goes on."""
        if self._space.guests is not None:
            self._space.guests.settle()
        if available and self._resizer.draining:
            self._resizer.drain_all()
        if available and self.waiters:
            self.waiters.notify()

    def admit_guests(self, num_blocks: int) -> bool:
        """Whether so many blocks more may lie in other pools' pages: with them a pool holds no more than its tier may
        grow to, so the oldest ones of its history go first.
        """
        space = self._space
        if space.guests is None:
            return False
        with space.lock:
            excess = space.guests.num_blocks + num_blocks - space.tiers[HBM].cap_slots
            if excess > 0:
                self._reclaimer.drop(excess, 1 << GUESTS, "evicted")
            return space.guests.num_blocks + num_blocks <= space.tiers[HBM].cap_slots

    def _take_turn(self, turn: Turn, num_blocks: int, tier: Tier, tenant: int) -> UInt64Array | None:
        if not self.waiters.may_try(turn):
            return None
        handles = self._try(num_blocks, tier, tenant)
        if handles is None:
            self.waiters.stand(turn, aside=self._over_quota(num_blocks, tier, tenant))
        return handles

    def _try(self, num_blocks: int, tier: Tier, tenant: int) -> UInt64Array | None:
        handles = np.empty(num_blocks, np.uint64)
        space, mask = self._space, tier.value
        if space.table.alloc(handles, mask, tenant):
            return handles
        with space.lock:
            while self._reclaimer.make_room(num_blocks, mask, tenant):
                if space.table.alloc(handles, mask, tenant):  # another thread may have been faster: it made progress
                    return handles
        return None

    def _patience(self, left: float | None) -> float:
        """How long to wait for a word: who leaves a shared arena's pages in another process sends none."""
        most = math.inf if self._space.handed is None else _LOOK_S
        return most if left is None else min(left, most)

    def _over_quota(self, num_blocks: int, tier: Tier, tenant: int) -> bool:
        return tenant != NOBODY and self._space.table.tenant_room(tenant, tier.value) < num_blocks

    def require_possible(self, num_blocks: int, tier: Tier, tenant: int = NOBODY) -> None:
        """Raises OutOfBlocks for more than the tiers can ever hold, QuotaExceeded for more than the tenant may have,
        ConfigError for less than none.
        """
        if num_blocks < 0:
            refuse_count(num_blocks)
        if num_blocks > sum(self._space.tiers[number].cap_slots for number in self._numbers(tier)):
            raise self.out_of_blocks(num_blocks, tier, OutOfBlocks, "")
        if tenant != NOBODY and num_blocks > self._quota(tier, tenant)[0]:
            raise self.refusal(num_blocks, tier, tenant)

    def _quota(self, tier: Tier, tenant: int) -> tuple[int, str]:
        """Blocks that the tenant may have in `tier` at most, and the cap that says so."""
        counts = self._space.table.tenant(tenant)
        by_tier = min(sum(counts.limit[number] for number in self._numbers(tier)), NO_LIMIT)
        if counts.block_limit <= by_tier:
            return counts.block_limit, "quota.total"
        return by_tier, f"quota.{'hbm' if tier & Tier.HBM else 'dram'}"

    def _numbers(self, tier: Tier) -> list[int]:
        numbers = [number for number in self._space.tiers if tier.value >> number & 1]
        if not numbers:
            raise ConfigError(
                f"this pool has no {tier.name} tier; create it with dram=...", setting="tier", value=str(tier)
            )
        return numbers

    def refusal(self, needed: int, tier: Tier, tenant: int) -> OutOfBlocks:
        """What a request that got nothing is told: whose fault it is."""
        if not self._over_quota(needed, tier, tenant):
            return self.out_of_blocks(needed, tier, OutOfBlocks, "")
        self._space.counters["over_quota_refused"] += 1
        counts, (limit, setting) = self._space.table.tenant(tenant), self._quota(tier, tenant)
        numbers = self._numbers(tier)
        evictable = sum(counts.historical[number] for number in numbers)
        used = sum(counts.used[number] for number in numbers)
        free = self._space.table.tenant_room(tenant, tier.value)
        return QuotaExceeded(
            f"need {needed} blocks, this tenant has {used} of at most {limit} in {tier.name or tier}, {evictable} of "
            f"them evictable; free some or raise {setting}",
            needed=needed, free=free, evictable=evictable, pinned=used - evictable, limit=limit, setting=setting,
        )  # fmt: skip

    def out_of_blocks(self, needed: int, tier: Tier, kind: type[OutOfBlocks], when: str) -> OutOfBlocks:
        numbers = self._numbers(tier)
        counts = [self._space.table.counts(number) for number in numbers]
        free, evictable = sum(c.free for c in counts), sum(c.historical for c in counts)
        pinned = sum(c.used - c.historical for c in counts)
        settings = " or ".join(self._space.tiers[number].setting for number in numbers)
        return kind(
            f"need {needed} blocks, {free} free and {evictable} evictable of {sum(c.limit for c in counts)} in "
            f"{tier.name or tier}, {pinned} in use{when}; free some, raise {settings}, or lower the batch",
            needed=needed, free=free, evictable=evictable, pinned=pinned,
        )  # fmt: skip
