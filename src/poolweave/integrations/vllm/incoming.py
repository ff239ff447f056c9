"""Incoming: KV that is on its way here for one request. Polled, never waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

from poolweave.errors import TransferFailed, TransferTimeout
from poolweave.integrations.vllm.question import Question
from poolweave.mempool import MemPool, Received


class Incoming:
    """The transfer `tag`, until `wait_s` from now, or as long as `alive()` says that its sender is there.

    `asked`: the question whether there is anything to send, where that had to be asked first.
    """

    def __init__(
        self, pool: MemPool, tag: bytes, wait_s: float, alive: Callable[[], bool], asked: Question | None = None
    ) -> None:
        self._pool = pool
        self._tag = tag
        self._until = time.monotonic() + wait_s
        self._alive = alive
        self._asked = asked
        self._received: Received | None = None
        self._over = False

    def over(self) -> bool:
        """True once it is here, or will not come. What came is held until close()."""
        if not self._over:
            self._over = self._look()
        return self._over

    def close(self) -> None:
        """Drop what came, and what may still come. Idempotent."""
        self._over = True
        if self._asked is not None:
            self._asked.drop()
        if self._received is not None:
            self._received.close()
        else:
            self._pool.discard(self._tag)

    @property
    def arrived(self) -> bool:
        """Whether it came."""
        return self._received is not None

    def _look(self) -> bool:
        late = time.monotonic() >= self._until or not self._alive()
        if self._asked is not None and not self._asked.num_tokens:
            return late or self._asked.num_tokens == 0
        try:
            self._received = self._pool.receive(self._tag, 0.0)
        except TransferTimeout:
            return late
        except TransferFailed:
            return True
        return True
