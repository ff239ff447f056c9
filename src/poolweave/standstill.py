"""For how long a signal (SIGSTOP) has kept a child process from running, as its parent is told by the kernel."""

from __future__ import annotations

import contextlib
import os
import time

_STEP_S = 1.0  # that one look may add: whoever was stopped together with its parent has not stood still for it


class Standstill:
    """Of the child `pid` of this process. It reaps nobody: how a child ended is others' to ask."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stopped_s: float | None = None  # None: it runs
        self._looked_s = time.monotonic()

    def seconds(self) -> float:
        """As far as was looked: ask again and again. 0 while it runs, and once it has ended."""
        with contextlib.suppress(ChildProcessError):
            told = os.waitid(os.P_PID, self._pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
            if told is not None:
                self._stopped_s = None if told.si_code == os.CLD_CONTINUED else 0.0
        elapsed_s, self._looked_s = time.monotonic() - self._looked_s, time.monotonic()
        if self._stopped_s is None:
            return 0.0
        self._stopped_s += min(elapsed_s, _STEP_S)
        return self._stopped_s
