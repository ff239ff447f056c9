"""WaitQueue: who waits for blocks, in order of arrival. Knows no blocks: the pool says when some may have come free.

Only the first waiter is woken, tries, and on leaving wakes the next: no later and smaller request overtakes it. One
that its tenant's quota holds up stands aside: those behind it need not wait for that.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable


class Turn:
    """One waiter's place. `blocking` waits without the GIL; `wake` is called from any thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.aside = False


class WaitQueue:
    """First come, first served. Thread-safe. Truthy while somebody waits."""

    def __init__(self) -> None:
        self.turns: deque[Turn] = deque()
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        return len(self.turns)

    def enter(self, wake: Callable[[], None]) -> Turn:
        """Stand in line. `wake` is called at each chance while the turn is first; it must not block."""
        turn = Turn(wake)
        with self._mutex:
            self.turns.append(turn)
        return turn

    def may_try(self, turn: Turn) -> bool:
        """True for the first in line, and for those who stand aside in front of it."""
        with self._mutex:
            return turn in self._in_front()

    def stand(self, turn: Turn, aside: bool) -> None:
        """`aside`: what it waits for is not what the others wait for."""
        changed, turn.aside = turn.aside != aside, aside
        if changed:
            self.notify()

    def _in_front(self) -> list[Turn]:
        front = []
        for turn in self.turns:
            front.append(turn)
            if not turn.aside:
                break
        return front

    def leave(self, turn: Turn) -> None:
        """Give the place up, and the chance to the next."""
        with self._mutex:
            self.turns.remove(turn)
        self.notify()

    def notify(self) -> None:
        """Something may have come free: wake who may try."""
        with self._mutex:
            front = self._in_front()
        for turn in front:
            turn.wake()

    def notify_all(self) -> None:
        """Wake everybody: the pool closes."""
        with self._mutex:
            turns = list(self.turns)
        for turn in turns:
            turn.wake()


class ThreadGate:
    """A chance for a thread to wait for. Waiting releases the GIL and can be interrupted by signals."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def wake(self) -> None:
        self._event.set()

    def wait(self, timeout: float) -> bool:
        """False when `timeout` seconds passed without a chance."""
        chance = self._event.wait(timeout)
        self._event.clear()
        return chance


class TaskGate:
    """The same for a task of the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:
            return  # its loop is closed: the task is gone, and its place with it

    async def wait(self, timeout: float | None) -> bool:
        try:
            await asyncio.wait_for(self._event.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        self._event.clear()
        return True
