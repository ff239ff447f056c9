"""Chore: a thread that works when it is nudged. Knows no blocks."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable

from poolweave.errors import InstanceClosed

_log = logging.getLogger(__name__)


class Chore:
    """Calls `work` on a thread of its own after each nudge() until close(); many nudges may become one call.

    An error in `work` is logged and the thread goes on: what it did not do, callers do for themselves.
    """

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._work = work
        self._wanted = threading.Event()
        self.closing = False  # long work looks here and ends
        self._thread = threading.Thread(target=self._run, name=f"poolweave-{name}", daemon=True)
        atexit.register(self.close)  # a thread that the interpreter ends inside native code takes the process with it
        self._thread.start()

    def nudge(self) -> None:
        self._wanted.set()

    def close(self) -> None:
        """Idempotent; waits for the work under way."""
        self.closing = True
        self._wanted.set()
        self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self.closing:
                return
            try:
                self._work()
            except InstanceClosed:
                return
            except Exception:  # noqa: BLE001 - a thread's boundary
                _log.exception("%s failed", self._thread.name)
