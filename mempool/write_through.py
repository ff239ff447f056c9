"""WriteThrough: copies sealed blocks to DRAM off the callers' path, so that demoting them later costs no copy."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import numpy as np

from poolweave.mempool.chore import Chore
from poolweave.mempool.reclaim import Reclaimer
from poolweave.mempool.space import DRAM, HBM, BlockSpace
from poolweave.types import UInt64Array

_log = logging.getLogger(__name__)
_BATCH = 64  # blocks that are held by one copy


class WriteThrough:
    """One thread, until close(). What it copies stays where it is; the copy is a mirror, which goes first when DRAM is
    short. Blocks that are gone or elsewhere by their turn, or find no room, are passed over: they are written back when
    they are demoted. An error in a copy leaves the block without a mirror.
    """

    def __init__(self, space: BlockSpace, reclaimer: Reclaimer, released: Callable[[int], None], name: str) -> None:
        """`released(n)` is told of blocks whose last other reference went during their copy."""
        self._space = space
        self._reclaimer = reclaimer
        self._released = released
        self._queue: deque[UInt64Array] = deque()
        self._chore = Chore(f"write-{name}", self._work)

    def offer(self, handles: UInt64Array) -> None:
        """These are sealed: copy them when there is time."""
        self._queue.append(handles.copy())
        self._chore.nudge()

    def close(self) -> None:
        """Idempotent; waits for the copy under way."""
        self._chore.close()

    def _work(self) -> None:
        while self._queue and not self._chore.closing:
            handles = self._queue.popleft()
            for first in range(0, len(handles), _BATCH):
                try:
                    self._write(handles[first : first + _BATCH])
                except Exception:  # noqa: BLE001 - the next ones are not at fault; these are written back later
                    _log.exception("%d blocks were not written through", len(handles[first : first + _BATCH]))

    def _write(self, handles: UInt64Array) -> None:
        space = self._space
        short = len(handles) - space.table.counts(DRAM).free
        if short > 0:
            with space.lock:
                self._reclaimer.extend(short, 1 << DRAM)
        chosen = np.empty(len(handles), np.uint64)
        slots, to = np.empty((2, len(handles)), np.int32)
        count = space.table.begin_mirrors(handles, chosen, slots, to)
        done = False
        try:
            space.copy(HBM, DRAM, slots[:count], to[:count])
            done = True
        finally:
            available = space.table.end_mirrors(chosen[:count], to[:count], done)
            self._released(available)
        space.counters["written_through"] += count
        space.counters["not_written_through"] += len(handles) - count
