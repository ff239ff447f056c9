"""Allocator: gives blocks out and takes references back, and lets callers wait their turn."""

from __future__ import annotations

import time

import numpy as np

from poolweave.errors import AllocTimeout, ConfigError, OutOfBlocks
from poolweave.mempool.reclaim import Reclaimer
from poolweave.mempool.resizer import Resizer
from poolweave.mempool.space import BlockSpace
from poolweave.mempool.waiters import TaskGate, ThreadGate, WaitQueue
from poolweave.types import Tier, UInt64Array


class Allocator:
    """All calls are all or nothing and thread-safe. Waiters are served in order of arrival; alloc without a timeout
    does not stand in line.
    """

    def __init__(self, space: BlockSpace, reclaimer: Reclaimer, resizer: Resizer) -> None:
        self._space = space
        self._reclaimer = reclaimer
        self._resizer = resizer
        self.waiters = WaitQueue()

    def alloc(self, num_blocks: int, tier: Tier) -> UInt64Array:
        """Raises OutOfBlocks. Evicts when it must."""
        self.require_possible(num_blocks, tier)
        handles = self._try(num_blocks, tier)
        if handles is None:
            raise self.out_of_blocks(num_blocks, tier, OutOfBlocks, "")
        return handles

    def alloc_wait(self, num_blocks: int, tier: Tier, timeout: float) -> UInt64Array:
        """Waits up to `timeout` seconds without the GIL. Raises AllocTimeout; OutOfBlocks for what can never fit."""
        self.require_possible(num_blocks, tier)
        deadline = time.monotonic() + timeout
        gate = ThreadGate()
        turn = self.waiters.enter(gate.wake)
        try:
            while True:
                handles = self._try(num_blocks, tier) if self.waiters.is_first(turn) else None
                if handles is not None:
                    return handles
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self.out_of_blocks(num_blocks, tier, AllocTimeout, f" after {timeout} s")
                gate.wait(left)
        finally:
            self.waiters.leave(turn)

    async def alloc_async(self, num_blocks: int, tier: Tier, timeout: float | None) -> UInt64Array:
        """The same for a task: other tasks run meanwhile. Cancelling it gives its place up."""
        self.require_possible(num_blocks, tier)
        deadline = None if timeout is None else time.monotonic() + timeout
        gate = TaskGate()
        turn = self.waiters.enter(gate.wake)
        try:
            while True:
                handles = self._try(num_blocks, tier) if self.waiters.is_first(turn) else None
                if handles is not None:
                    return handles
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise self.out_of_blocks(num_blocks, tier, AllocTimeout, f" after {timeout} s")
                await gate.wait(left)
        finally:
            self.waiters.leave(turn)

    def free(self, handles: UInt64Array) -> None:
        """Drop one reference on each. Raises UnknownBlock, StaleHandle."""
        self.released(self._space.table.free(handles))

    def released(self, available: int) -> None:
        """`available` blocks became free or evictable: whoever waits for that goes on."""
        if available and self._resizer.draining:
            self._resizer.drain_all()
        if available and self.waiters:
            self.waiters.notify()

    def _try(self, num_blocks: int, tier: Tier) -> UInt64Array | None:
        handles = np.empty(num_blocks, np.uint64)
        space, mask = self._space, tier.value
        if space.table.alloc(handles, mask):
            return handles
        with space.lock:
            while self._reclaimer.make_room(num_blocks, mask):
                if space.table.alloc(handles, mask):  # another thread may have been faster: it made progress
                    return handles
        return None

    def require_possible(self, num_blocks: int, tier: Tier) -> None:
        """Raises OutOfBlocks for more than the tiers can ever hold, ValueError for less than none."""
        if num_blocks < 0:
            raise ValueError(f"num_blocks must not be negative, got {num_blocks}")
        if num_blocks > sum(self._space.tiers[number].cap_slots for number in self._numbers(tier)):
            raise self.out_of_blocks(num_blocks, tier, OutOfBlocks, "")

    def _numbers(self, tier: Tier) -> list[int]:
        numbers = [number for number in self._space.tiers if tier.value >> number & 1]
        if not numbers:
            raise ConfigError(
                f"this pool has no {tier.name} tier; create it with dram=...", setting="tier", value=str(tier)
            )
        return numbers

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
