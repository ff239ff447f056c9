"""Sweeper: keeps room in HBM ahead of need, off the callers' path. Knows no requests."""

from __future__ import annotations

from poolweave.mempool.chore import Chore
from poolweave.mempool.config import Watermarks
from poolweave.mempool.reclaim import Reclaimer
from poolweave.mempool.space import HBM, BlockSpace


class Sweeper:
    """Above `marks.high` of HBM in use a thread demotes or evicts history down to `marks.low`, until close().

    nudge() is called when blocks may have become history; it costs a look at two counters. Nothing that is active is
    touched, and a pass ends when no history is left.
    """

    def __init__(self, space: BlockSpace, reclaimer: Reclaimer, marks: Watermarks, *, name: str) -> None:
        self._space = space
        self._reclaimer = reclaimer
        self._marks = marks
        self._chore = Chore(f"sweep-{name}", self._sweep)

    def nudge(self) -> None:
        counts = self._space.table.counts(HBM)
        if counts.used > self._marks.high * counts.limit and counts.historical:
            self._chore.nudge()

    def close(self) -> None:
        """Idempotent; waits for the pass under way."""
        self._chore.close()

    def _sweep(self) -> None:
        with self._space.lock:
            counts = self._space.table.counts(HBM)
            excess = min(counts.used - int(self._marks.low * counts.limit), counts.historical)
            if excess <= 0:
                return
            swept = self._reclaimer.demote(excess) if self._space.has_dram else 0
            swept += self._reclaimer.drop(excess - swept, 1 << HBM, "evicted")
            self._space.counters["swept"] += swept
