"""Strike: SIGKILL for another process at a named step of the engine that this runs in."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Found = tuple[Any, str, bool]  # an object, a method of it, and whether to strike after it rather than before


class Strike:
    """Kills `pid` once, at one of STEPS; `struck` says that the step was reached. One at a time."""

    def __init__(self, engine: Any, pid: int, step: str) -> None:
        self.struck = False
        where, countdown, wanted = STEPS[step]
        owner, name, after = where(engine)
        method = getattr(owner, name)

        def striking(*arguments: Any, **named: Any) -> Any:
            nonlocal countdown
            due = not self.struck and (wanted is None or wanted(engine))
            countdown -= due
            due = due and countdown == 0
            if due and not after:
                self._strike(pid)
            result = method(*arguments, **named)
            if due and after:
                self._strike(pid)
            return result

        self._undo = lambda: setattr(owner, name, method)
        setattr(owner, name, striking)

    def over(self) -> bool:
        """Take it away. -> whether it struck"""
        self._undo()
        return self.struck

    def _strike(self, pid: int) -> None:
        self.struck = True
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(FileNotFoundError):  # whose parent was quick to bury it
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                time.sleep(0.001)


def _saves(engine: Any) -> bool:
    return len(engine.worker._plan.saves) > 0


def _loads(engine: Any) -> bool:
    return len(engine.worker._plan.loads) > 0


def _fetcher(engine: Any) -> Any:
    return engine.side.pool._links.engine._receiver._fetcher


STEPS: dict[str, tuple[Callable[[Any], Found], int, Callable[[Any], bool] | None]] = {
    "before the lookup": (lambda e: (e.side, "lookup", False), 1, None),
    "once asked": (lambda e: (e.side._traffic._keeper, "ask", True), 1, None),
    "while it waits": (lambda e: (e.side, "lookup", False), 5, None),
    "between offer and pull": (lambda e: (_fetcher(e), "take", False), 1, None),
    "after the pull": (lambda e: (_fetcher(e), "take", True), 1, None),
    "before what came is claimed": (lambda e: (e.side._traffic, "claimed", False), 1, None),
    "before the load": (lambda e: (e.worker, "_load", False), 1, None),
    "after the load": (lambda e: (e.worker, "_copy", True), 1, _loads),
    "during a save": (lambda e: (e.worker, "_copy", True), 1, _saves),
    "before a save is settled": (lambda e: (e.side, "settle", False), 1, None),
    "when the request ends": (lambda e: (e.side, "finished", True), 1, None),
    "before its KV is offered": (lambda e: (e.side.pool, "transfer_with_insert", False), 1, None),
    "once its KV is offered": (lambda e: (e.side.pool, "transfer_with_insert", True), 1, None),
}
