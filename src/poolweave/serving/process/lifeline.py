"""The socket pair between a parent and the process it started: settings down, readiness up, and life itself.

It ends when either process does, however it does: the instance then stops, and the parent knows at once.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import msgspec

from poolweave.errors import DeadlineExceeded, InstanceDied
from poolweave.serving.control.messages import ErrorInfo

C = TypeVar("C")
_GRACE_S = 10.0  # from the parent's end to a hard exit
_LOOK_S = 0.05


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The process serves at `address`."""

    address: str


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The process could not start and is about to exit."""

    error: ErrorInfo


Word: TypeAlias = Ready | StartFailed


def receive_config(line: socket.socket, kind: type[C]) -> C:
    """The settings that the parent sends first, as a `kind`; one line of JSON."""
    return msgspec.json.decode(_read_line(line), type=kind)


def send_config(line: socket.socket, config: Any) -> None:
    """Hand a new process its settings."""
    line.sendall(msgspec.json.encode(config) + b"\n")


def say(line: socket.socket, word: Word) -> None:
    """Tell the parent how the start went; a parent that has gone already is no error."""
    try:
        line.sendall(msgspec.json.encode(word) + b"\n")
    except (BrokenPipeError, ConnectionResetError):
        return


def hear(line: socket.socket, *, instance: str, timeout_s: float, meanwhile: Callable[[], None] = lambda: None) -> str:
    """Wait for the process's word, and call `meanwhile` again and again; -> its address.

    Raises the error that kept it from starting, InstanceDied when it ended without a word, DeadlineExceeded.
    """
    deadline = time.monotonic() + timeout_s
    try:
        while not _speaks(line, min(_LOOK_S, timeout_s)):
            if time.monotonic() >= deadline:
                raise TimeoutError
            meanwhile()
        line.settimeout(max(_LOOK_S, deadline - time.monotonic()))  # a long word comes in pieces
        word = msgspec.json.decode(_read_line(line), type=Word)
    except TimeoutError:
        raise DeadlineExceeded(
            f"{instance} was not ready after {timeout_s:g} s; raise start_timeout_s or choose a smaller model",
            peer=instance,
            seconds=timeout_s,
        ) from None
    except (EOFError, ConnectionResetError):
        raise InstanceDied(f"{instance} ended before it was ready", instance=instance) from None
    if isinstance(word, StartFailed):
        raise word.error.error()
    return word.address


def end_with_parent(line: socket.socket) -> None:
    """From now on the parent's end asks this process to stop as SIGTERM does, and makes it after a grace period."""

    def watch() -> None:
        line.settimeout(None)
        try:
            while line.recv(4096):
                pass
        except OSError:
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _speaks(line: socket.socket, within_s: float) -> bool:
    """Whether something can be read, or the other end closed, by then."""
    line.settimeout(within_s)
    try:
        line.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return False
    return True


def _read_line(line: socket.socket) -> bytes:
    """Up to the newline. Raises EOFError when the other end closed before it."""
    received = bytearray()
    while not received.endswith(b"\n"):
        piece = line.recv(65536)
        if not piece:
            raise EOFError("the other end closed")
        received += piece
    return bytes(received)
