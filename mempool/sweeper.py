"""Sweeper: keeps room in HBM ahead of need, off the callers' path. Knows no requests."""

from __future__ import annotations

import logging
import threading

from poolweave.errors import InstanceClosed
from poolweave.mempool.reclaim import Reclaimer
from poolweave.mempool.space import HBM, BlockSpace

_log = logging.getLogger(__name__)


class Sweeper:
    """Above `high` (a share of HBM in use) a thread demotes or evicts history down to `low`. One thread, until close().

    nudge() is called when blocks may have become history; it costs a look at two counters. Nothing that is active is
    touched, and a pass ends when no history is left.
    """

    def __init__(self, space: BlockSpace, reclaimer: Reclaimer, *, low: float, high: float, name: str) -> None:
        self._space = space
        self._reclaimer = reclaimer
        self._low = low
        self._high = high
        self._wanted = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"poolweave-sweep-{name}", daemon=True)
        self._thread.start()

    def nudge(self) -> None:
        counts = self._space.table.counts(HBM)
        if counts.used > self._high * counts.limit and counts.historical:
            self._wanted.set()

    def close(self) -> None:
        """Idempotent; waits for the pass under way."""
        self._closed = True
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._closed:
                return
            try:
                self._sweep()
            except InstanceClosed:
                return
            except Exception:  # noqa: BLE001 - a thread's boundary: callers evict for themselves then
                _log.exception("a sweep failed; blocks are evicted when they are needed")

    def _sweep(self) -> None:
        with self._space.lock:
            counts = self._space.table.counts(HBM)
            excess = min(counts.used - int(self._low * counts.limit), counts.historical)
            if excess <= 0:
                return
            swept = self._reclaimer.demote(excess) if self._space.has_dram else 0
            swept += self._reclaimer.drop(excess - swept, 1 << HBM, "evicted")
            self._space.counters["swept"] += swept
