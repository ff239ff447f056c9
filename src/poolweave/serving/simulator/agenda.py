"""A virtual clock: what happens when, in order. Ties happen in the order in which they were planned."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any


class Agenda:
    """Events by time. Not thread-safe; never waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0

    def __len__(self) -> int:
        return len(self._events)

    def at(self, time_s: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act(*args)` at this time, or now if that has passed."""
        self._planned += 1
        heapq.heappush(self._events, (max(time_s, self.now), self._planned, act, args))

    def after(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act(*args)` so many seconds from now."""
        self._planned += 1
        heapq.heappush(self._events, (max(self.now + seconds, self.now), self._planned, act, args))

    def each(self, times_s: Sequence[float], act: Callable[[int], None]) -> None:
        """Call `act(i)` at the i-th of these times, which ascend: as `at` for each, but one at a time is kept."""
        first, now = self._planned + 1, self.now
        self._planned += len(times_s)

        def plan(i: int) -> None:
            if i < len(times_s):
                heapq.heappush(self._events, (max(times_s[i], now), first + i, happen, (i,)))

        def happen(i: int) -> None:
            plan(i + 1)
            act(i)

        plan(0)

    def run(self, until: Callable[[], bool]) -> int:
        """Act until `until()` holds before an event, or nothing is planned. Returns the number of events."""
        events, count = self._events, 0
        while events and not until():
            self.now, _, act, args = heapq.heappop(events)
            act(*args)
            count += 1
        return count
