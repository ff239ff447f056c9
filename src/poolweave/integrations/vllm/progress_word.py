"""ProgressWord: how far the step under way has come, which workers write and the scheduler's side reads meanwhile."""

from __future__ import annotations

import mmap
import os

import numpy as np

from poolweave.mempool import TierWindow

_LAYER_BITS = 16


class ProgressMemory:
    """The word's memory, of this process."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("poolweave-progress", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, mmap.PAGESIZE)
        self.window = TierWindow(os.getpid(), self._fd, mmap.PAGESIZE, 0, 0)

    def close(self) -> None:
        """Idempotent; who has opened the word keeps it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class ProgressWord:
    """One aligned word of eight bytes: it is never read half written."""

    def __init__(self, window: TierWindow) -> None:
        """Raises SystemCallFailed."""
        self.window = window
        self._word = window.open().view(np.int64)

    def write(self, step: int, layers: int) -> None:
        """The first `layers` layers of step `step` are saved."""
        self._word[0] = step << _LAYER_BITS | layers

    def read(self) -> tuple[int, int]:
        """-> step, layers"""
        return divmod(int(self._word[0]), 1 << _LAYER_BITS)
