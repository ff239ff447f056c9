"""A virtual clock: what happens when, in order. Ties happen in the order in which they were planned."""

from __future__ import annotations

import heapq
from collections.abc import Callable
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
        self.at(self.now + seconds, act, *args)

    def run(self, until: Callable[[], bool]) -> int:
        """Act until `until()` holds before an event, or nothing is planned. Returns the number of events."""
        events, count = self._events, 0
        while events and not until():
            self.now, _, act, args = heapq.heappop(events)
            act(*args)
            count += 1
        return count
