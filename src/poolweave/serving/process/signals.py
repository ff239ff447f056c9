"""Signals that end a process: they are heard at once, whatever its main thread is about to wait for.

A handler of Python's runs in the main thread, between two of its instructions. A signal that comes just before a call
that blocks is therefore kept until that call returns, which may be never; the wakeup descriptor is written at once.
The handler writes to it once more: an event loop puts a descriptor of its own in its place, and then runs handlers.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def ended_by(*numbers: signal.Signals, stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop`, in a thread of its own, for every one of these signals; afterwards they are ignored.

    Enter it from the main thread.
    """
    ours, kernels = socket.socketpair()
    kernels.setblocking(False)  # as the wakeup descriptor must be
    with ours, kernels:
        for number in numbers:
            signal.signal(number, lambda signum, frame: _say(kernels, signum))
        before = signal.set_wakeup_fd(kernels.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=_listen, args=(ours, set(numbers), stop), name="signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            for number in numbers:
                signal.signal(number, signal.SIG_IGN)
            signal.set_wakeup_fd(before)
            kernels.shutdown(socket.SHUT_WR)
            thread.join()


def _say(line: socket.socket, number: int) -> None:
    with contextlib.suppress(BlockingIOError):  # full of signals already
        line.send(bytes([number]))


def _listen(line: socket.socket, numbers: set[signal.Signals], stop: Callable[[], None]) -> None:
    while heard := line.recv(64):
        if numbers.intersection(heard):  # one byte a signal; other handlers' signals come here too
            stop()
