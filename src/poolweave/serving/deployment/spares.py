"""Instance processes that have started and imported all that takes long, and wait for whom they are to be.

Importing torch takes seconds of a restart (three of a core, more on a busy machine), opening a pool and joining a third
of one. A process that is spawned beforehand needs no fork of threads, locks and sockets that were open, and is as fresh
as any other. It costs the memory of an idle interpreter with torch (0.3 GiB), and no weights.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from poolweave.serving.process.child import Child, Program

logger = logging.getLogger(__name__)

_AGAIN_S = 5.0  # between two replacements of those that died waiting: one that cannot start must not keep a core busy


class Spares:
    """`count` of one kind of process: another module or thread count is not served. One that a signal stopped for
    `stopped_s` is of no use any more. Thread-safe.

    New ones are started when no instance is starting any more, so that they take no time from those that are missed.
    A spare that died meanwhile, or is stopped, is not given out; `look_after` replaces it.
    """

    def __init__(self, program: Program, count: int, stopped_s: float) -> None:
        self._kind = program
        self._count = count
        self._stopped_s = stopped_s
        self._lock = threading.Lock()
        self._waiting: list[Child] = []
        self._closed = False
        self._starting = 0
        self._due_s = 0.0  # when those that died waiting may be replaced
        self.given = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Of those who wait."""
        with self._lock:
            return tuple(child.pid for child in self._waiting if child.alive)

    def take(self, program: Program) -> Child | None:
        """One that waits, as `program`; None when nobody does, or they are of another kind."""
        if (program.module, program.num_threads) != (self._kind.module, self._kind.num_threads):
            return None
        with self._lock:
            self._sort_out()
            child = next((one for one in self._waiting if not one.stopped_s), None)
            if child is None:
                return None
            self._waiting.remove(child)
            self.given += 1
        child.settle(program)
        return child

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Around the start of an instance. After the last one, spares are started for those that are missing."""
        with self._lock:
            self._starting += 1
        try:
            yield
        finally:
            with self._lock:
                self._starting -= 1
                self._refill()

    def look_after(self) -> None:
        """Call it again and again: who died waiting is replaced."""
        with self._lock:
            if time.monotonic() >= self._due_s and self._refill():
                self._due_s = time.monotonic() + _AGAIN_S

    def close(self) -> None:
        """End who waits. Idempotent."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, []
        for child in waiting:
            _end(child)

    def _refill(self) -> int:
        """Called with the lock; -> how many were missing. That none can be started harms nobody who runs."""
        self._sort_out()
        missing = 0 if self._starting or self._closed else self._count - len(self._waiting)
        for _ in range(missing):
            try:
                self._waiting.append(Child(self._kind, waits=True))
            except OSError as error:
                logger.warning("no spare can be started, so who dies takes longer to come back: %s", error)
                self._due_s = time.monotonic() + _AGAIN_S
                break
        return missing

    def _sort_out(self) -> None:
        """Called with the lock: those of no use are ended."""
        useful = [child for child in self._waiting if child.alive and child.stopped_s < self._stopped_s]
        for child in self._waiting:
            if child not in useful:
                _end(child)
        self._waiting = useful


def _end(child: Child) -> None:
    child.kill()
    child.close()
