"""What Python code is to be called when, on the clock of the simulated instances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from poolweave.serving.simulator._native import SimulatedFleet


class Agenda:
    """Calls by time. Ties, those with what instances do included, happen in the order in which they were planned."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet
        self._calls: dict[int, tuple[Callable[..., None], tuple[Any, ...]]] = {}
        self._planned = 0

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def now(self) -> float:
        return self._fleet.now()

    def at(self, time_s: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act(*args)` at this time, or now if that has passed."""
        self._planned += 1
        self._calls[self._planned] = (act, args)
        self._fleet.call_at(time_s, self._planned)

    def after(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act(*args)` so many seconds from now."""
        self.at(self.now + seconds, act, *args)

    def happen(self, mark: int) -> None:
        """Make the call that the fleet came to."""
        act, args = self._calls.pop(mark)
        act(*args)
