"""TCP: the receiver asks for bytes of an offer over data connections that it opens; native code moves them.

The sender holds the blocks while a chunk is sent and looks at the offer before each one (csrc/core/stream.hpp), so a
late request gets nothing. No Python runs between the first and the last byte.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence

from poolweave.errors import InstanceClosed
from poolweave.transfer._native import Outcome, Pull, StreamServer, Wire, pull_blocks
from poolweave.transfer.data_line import data_address, dial
from poolweave.transfer.layout import KVLayout
from poolweave.transfer.messages import Hello
from poolweave.transfer.offers import OpenOffer
from poolweave.transfer.transport import Home, PullSlice, Source

_IDLE_S = 60.0  # the sender ends a data connection that asked for nothing this long
_KEEP_S = 30.0  # the receiver does not reuse one older than this, so it never meets that end
_CHUNK_BYTES = 640 << 10  # four sends (csrc/core/wire.cpp), none of them small
_STEP_SHIFT = 48  # offers' numbers are far below
_WORTH_ANOTHER = 4 << 20  # bytes from which a further connection pays


class TcpSource(Source):
    """A pool of data connections to one sender, opened as needed."""

    is_instant = False

    def __init__(self, home: Home, hello: Hello) -> None:
        self._home = home
        self._peer = hello.instance
        self._epoch = hello.epoch
        self._address = data_address(hello, "tcp")
        self._lock = threading.Lock()
        self._idle: list[tuple[float, Wire]] = []
        self._closed = False

    def pull(self, slice_: PullSlice) -> Outcome:
        limits = self._home.limits
        count = max(1, min(limits.connections, slice_.target.nbytes // _WORTH_ANOTHER))
        wires: list[Wire] = []
        ask = Pull(
            offer=_stream(slice_.offer.offer, slice_.step),
            nonce=slice_.offer.nonce,
            first_block=slice_.first - slice_.step_first,
            chunk_bytes=_CHUNK_BYTES,
        )
        wires = self._take(count)
        outcome = pull_blocks(wires, ask, slice_.target, limits.stall_s, slice_.timeout_s, slice_.abort, slice_.hashes)
        self._give_back(wires)  # after an error they are out of step, and dropped
        return outcome

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._idle.clear()

    def _take(self, count: int) -> list[Wire]:
        now = time.monotonic()
        with self._lock:
            if self._closed:
                raise InstanceClosed(f"the connection to {self._peer} is closed")
            self._idle = [(since, wire) for since, wire in self._idle if now - since < _KEEP_S]
            taken = [self._idle.pop()[1] for _ in range(min(count, len(self._idle)))]
        while len(taken) < count:
            taken.append(self._open())
        return taken

    def _give_back(self, wires: Sequence[Wire]) -> None:
        now = time.monotonic()
        with self._lock:
            if not self._closed:
                self._idle += [(now, wire) for wire in wires]

    def _open(self) -> Wire:
        return Wire(dial(self._home, self._peer, self._epoch, self._address).detach())


class TcpTransport:
    """Both sides of the data plane over TCP of one engine."""

    in_place = False

    def __init__(self, home: Home) -> None:
        self._home = home
        self._server = StreamServer(home.limits.stall_s, _IDLE_S)

    def introduce(self, connection: socket.socket) -> tuple[str, tuple[int, ...]]:
        return self._home.data_address(connection, "tcp"), ()

    def attach(self, hello: Hello, fds: Sequence[int], layout: KVLayout) -> TcpSource:
        for fd in fds:
            os.close(fd)
        return TcpSource(self._home, hello)

    def publish(self, offer: OpenOffer, step: int = 0) -> None:
        """A growing offer has a stream for each step, none for the whole."""
        if offer.growth is None or step:
            lifetime_s = max(0.0, offer.deadline - time.monotonic())
            stream = _stream(offer.number, step)
            self._server.publish(stream, offer.nonce, offer.extents(self._home.memory, step), lifetime_s)

    def revoke(self, offer: OpenOffer) -> None:
        for step in range(1 + (len(offer.growth.steps) if offer.growth is not None else 0)):
            self._server.revoke(_stream(offer.number, step))

    def adopt(self, sock: socket.socket) -> None:
        self._server.adopt(sock.detach())

    def close(self) -> None:
        self._server.close()


def _stream(offer: int, step: int) -> int:
    """What names an offer's stream, or that of a step, on a data connection."""
    return step << _STEP_SHIFT | offer
