"""Losses: what this engine announced to peers and could not hand over, until each of them has heard so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from poolweave.errors import PoolweaveError
from poolweave.mempool import MemPool

_LOOK_S = 0.05  # how often a peer that is not there is looked for


@dataclass(frozen=True, slots=True)
class _Loss:
    peer: str
    tag: bytes
    until: float


class Losses:
    """Thread-safe. `tell(peer, tag)` says it to a peer that is there; one that is not may be starting anew just now."""

    def __init__(self, pool: MemPool, tell: Callable[[str, bytes], None], wait_s: float) -> None:
        """`wait_s`: how long a request waits at a peer, and so how long it matters."""
        self._pool = pool
        self._tell = tell
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._untold: list[_Loss] = []
        self._looking = False  # a timer runs: one for all, of whom there may be hundreds

    def add(self, peer: str, tag: bytes) -> None:
        """What was announced under `tag` was lost."""
        with self._lock:
            self._untold.append(_Loss(peer, tag, time.monotonic() + self._wait_s))
            looked_for, self._looking = self._looking, True
        if not looked_for:
            self._look()

    def _look(self) -> None:
        with self._lock:
            losses, self._untold = self._untold, []
        left = [loss for loss in losses if not self._is_over(loss)]
        with self._lock:
            self._untold += left
            again = self._looking = bool(self._untold)
        if again:
            timer = threading.Timer(_LOOK_S, self._look)
            timer.daemon = True
            timer.start()

    def _is_over(self, loss: _Loss) -> bool:
        """False: the peer is not there, and may still come."""
        try:
            if not self._pool.presence(loss.peer).epoch:
                return time.monotonic() >= loss.until
        except PoolweaveError:  # closed, with all that it announced
            return True
        self._tell(loss.peer, loss.tag)
        return True
