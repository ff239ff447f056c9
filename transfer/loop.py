"""The engine's one thread: waits on sockets and deadlines, and runs their handlers. Knows no protocol."""

from __future__ import annotations

import atexit
import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from poolweave.transfer._native import Poller

READ, WRITE = select.EPOLLIN | select.EPOLLRDHUP, select.EPOLLOUT
_log = logging.getLogger(__name__)


class Loop:
    """Runs `handler(events)` for each ready descriptor and `tick(now)` when the time it asked for has come.

    `tick` returns when it wants to run next (monotonic seconds, inf for never). Handlers run one at a time, on the
    loop's thread; one that raises is logged and unregistered.
    """

    def __init__(self, name: str, tick: Callable[[float], float], spin_s: float = 0.0) -> None:
        """After something happened it looks for more during `spin_s`, where that pays, before it sleeps."""
        self._epoll = select.epoll()
        self._poller = Poller(self._epoll.fileno())
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._tick = tick
        self._spin_s = spin_s
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._soon: deque[Callable[[], None]] = deque()
        self._wakes_at = 0.0  # tick at once
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        atexit.register(self.stop)  # a thread that the interpreter ends inside native code takes the process with it
        self._thread.start()

    def on_loop(self) -> bool:
        return threading.current_thread() is self._thread

    def register(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        if fd in self._handlers:
            self._epoll.modify(fd, events)

    def unregister(self, fd: int) -> None:
        """Idempotent. Call before closing the descriptor."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_soon(self, action: Callable[[], None]) -> None:
        """Run `action` on the loop's thread. From any thread."""
        self._soon.append(action)
        self._wake()

    def wake_by(self, deadline: float) -> None:
        """Make sure that `tick` runs by `deadline`. From any thread; costs nothing when it would anyway."""
        if deadline < self._wakes_at:
            self._wakes_at = deadline
            if not self.on_loop():
                self._wake()

    def stop(self) -> None:
        """Ends the thread, from another one. Idempotent."""
        self._stopping = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join()
        atexit.unregister(self.stop)

    def close(self) -> None:
        """Gives the loop's descriptors back, once it has stopped and all others are unregistered. Idempotent."""
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._wake_fd)

    def _wake(self) -> None:
        try:
            os.eventfd_write(self._wake_fd, 1)
        except OSError:
            if not self._stopping:
                raise

    def _run(self) -> None:
        spin_s = 0.0
        while not self._stopping:
            now = time.monotonic()
            if now >= self._wakes_at:
                self._wakes_at = math.inf
                self._wakes_at = min(self._wakes_at, self._guarded_tick(now))
            wait = -1.0 if self._wakes_at == math.inf else max(0.0, self._wakes_at - now)
            ready = self._poller.wait(min(spin_s, wait) if wait >= 0 else spin_s, wait)
            for fd, events in ready:
                self._dispatch(fd, events)
            spin_s = self._spin_s if ready else 0.0
            while self._soon:
                self._guarded(self._soon.popleft())

    def _dispatch(self, fd: int, events: int) -> None:
        if fd == self._wake_fd:
            os.eventfd_read(fd)
            self._wakes_at = 0.0  # a wake_by() that met a tick half-way may have been overwritten: tick again
            return
        handler = self._handlers.get(fd)
        if handler is None:
            return  # unregistered by an earlier handler of this round
        try:
            handler(events)
        except Exception:  # noqa: BLE001  # the thread's boundary: one bad connection must not end the others
            _log.exception("a handler of the transfer loop failed; its descriptor is dropped")
            self.unregister(fd)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # noqa: BLE001
            _log.exception("an action of the transfer loop failed")

    def _guarded_tick(self, now: float) -> float:
        try:
            return self._tick(now)
        except Exception:  # noqa: BLE001
            _log.exception("the tick of the transfer loop failed")
            return now + 1.0
