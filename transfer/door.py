"""Where connections come in: accepts, checks who it is, and bounds how long a greeting may take."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Callable

from poolweave.errors import PoolweaveError, ProtocolError
from poolweave.transfer.addresses import Address, listen
from poolweave.transfer.keys import greeting_key
from poolweave.transfer.link import Link, is_temporary, peer_uid
from poolweave.transfer.loop import READ, Loop
from poolweave.transfer.messages import GREETINGS, Greeting, Refused, decode, describe, encode
from poolweave.transfer.transport import Limits

_PAUSE_S = 0.1
_MOST_GREETING = 1024  # connections that have not said who they are
_log = logging.getLogger(__name__)

OnGreeting = Callable[["Door", Link, Greeting, "list[int]"], None]


class Door:
    """A listening socket. All calls but the constructor happen on the loop's thread.

    `on_greeting(door, link, greeting, fds)` takes over each connection whose first frame is a valid greeting; raising
    a PoolweaveError there refuses it with that error.
    """

    def __init__(self, loop: Loop, address: Address, limits: Limits, on_greeting: OnGreeting) -> None:
        self._sock, self.address = listen(address, "listen")
        self._loop = loop
        self._key = greeting_key(limits.secret) if limits.secret is not None else None
        self._timeout_s = limits.connect_timeout_s
        self._tls = limits.tls if not address.is_local else None
        self._on_greeting = on_greeting
        self._greeting: dict[Link, float] = {}  # by deadline: all have the same timeout
        self._paused_until = math.inf

    def open(self) -> None:
        self._loop.register(self._sock.fileno(), READ, self._accept)

    def close(self) -> None:
        """Idempotent."""
        if self._sock.fileno() >= 0:
            self._loop.unregister(self._sock.fileno())
            self._sock.close()
        for link in list(self._greeting):
            link.close()
        self._greeting.clear()

    def tick(self, now: float) -> float:
        """Ends greetings that take too long; returns when it wants to be called again."""
        while self._greeting:
            link, deadline = next(iter(self._greeting.items()))
            if deadline > now:
                break
            del self._greeting[link]
            link.close()
        if now >= self._paused_until:
            self._paused_until = math.inf
            self.open()
        return min(self._paused_until, next(iter(self._greeting.values()), math.inf))

    def _accept(self, _: int) -> None:
        for _ in range(64):  # then others get their turn
            try:
                sock, _address = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if is_temporary(error):
                    self._pause(error)
                return  # else a connection that ended before it was accepted
            sock.setblocking(False)
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        stranger = sock.family == socket.AF_UNIX and peer_uid(sock) not in (os.geteuid(), 0)
        if stranger or len(self._greeting) >= _MOST_GREETING:
            sock.close()
            return
        if self._tls is not None:
            sock = self._tls.accept(sock)
        link = Link(self._loop, sock, self._key, self._greet, self._lost)
        self._greeting[link] = time.monotonic() + self._timeout_s
        self._loop.wake_by(self._greeting[link])
        link.start()

    def _greet(self, link: Link, payload: bytes, fds: list[int]) -> None:
        del self._greeting[link]
        try:
            self._on_greeting(self, link, decode(GREETINGS, payload), fds)
        except PoolweaveError as error:
            _log.info("refused a connection at %s: %s", self.address, error)
            self._refuse(link, error)
            link.close()

    def _lost(self, link: Link, error: PoolweaveError) -> None:
        self._greeting.pop(link, None)
        if isinstance(error, ProtocolError):
            _log.warning("a connection at %s was dropped: %s", self.address, error)
            self._refuse(link, error)

    def _refuse(self, link: Link, error: PoolweaveError) -> None:
        name, message, numbers = describe(error)
        with contextlib.suppress(PoolweaveError):  # it did not wait for the answer
            link.send(encode(Refused(name, message, numbers)))

    def _pause(self, error: OSError) -> None:
        """Out of descriptors, say: the queue stays, so stop asking for a while instead of spinning."""
        _log.warning("cannot accept at %s for now: %s", self.address, error)
        self._loop.unregister(self._sock.fileno())
        self._paused_until = time.monotonic() + _PAUSE_S
        self._loop.wake_by(self._paused_until)
