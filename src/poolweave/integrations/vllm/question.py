"""Question: one engine's to its pool process, what of a prompt it has. Polled, never waited for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future


class Question:
    """`future` gives (tokens, life): how many the process sends, and in which life it said so.

    `life()` is the process's present one, None while it is not worth waiting for.
    """

    def __init__(self, future: Future[tuple[int, int]], life: Callable[[], int | None]) -> None:
        self._future = future
        self._life = life

    @property
    def num_tokens(self) -> int | None:
        """None until it is answered; 0: nothing will come."""
        if not self._future.done():
            return None
        if self._future.cancelled() or self._future.exception() is not None:
            return 0
        return self._future.result()[0]

    def open(self) -> bool:
        """Whether the answer, or what it promised, may still come."""
        life = self._life()
        if life is None or self.num_tokens is None:
            return life is not None
        return self.num_tokens > 0 and life == self._future.result()[1]

    def drop(self) -> None:
        """Do not ask, if that has not begun. Idempotent."""
        self._future.cancel()
