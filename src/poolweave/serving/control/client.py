"""The calling side of the control protocol: one connection and one thread a peer, calls from any thread.

A client lives as long as its peer's process. When that ends, everything pending fails with PeerLost and so does
every later call: a restarted peer has a new epoch and gets a new client.
"""

from __future__ import annotations

import collections
import itertools
import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import zmq

from poolweave.errors import DeadlineExceeded, PeerLost, PoolweaveError
from poolweave.serving.control.connection import HELLO_ID, RpcConnection
from poolweave.serving.control.messages import Emit, Failure

R = TypeVar("R")


class RpcClient:
    """One peer, any number of threads. Its first call is `greet`; until then it knows no epoch.

    `peer` is the name used in errors, `replies` the union of messages that it may send. Raises ConfigError for an
    address that is none.
    """

    def __init__(self, address: str, *, peer: str, replies: Any) -> None:
        self.peer = peer
        self._ids = itertools.count(HELLO_ID)
        self._lock = threading.Lock()  # guards _pending, _lost, _wake
        self._pending: dict[int, queue.SimpleQueue[Any]] = {}
        self._outbox: collections.deque[list[bytes]] = collections.deque()
        self._lost: PeerLost | None = None
        self._closing = False
        self._connection = RpcConnection(address, peer=peer, replies=replies)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"rpc-{peer}", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """The peer's."""
        return self._connection.epoch

    @property
    def lost(self) -> bool:
        """True once the peer has gone."""
        return self._lost is not None

    def require(self) -> None:
        """Raises PeerLost when the peer has gone."""
        with self._lock:
            if self._lost is not None:
                raise self._again(self._lost)

    def greet(self, request: Any, expect: type[R], *, timeout_s: float) -> R:
        """The first call. Raises as `call` does; then the client is closed."""
        try:
            return self.call(request, expect, timeout_s=timeout_s)
        except BaseException:
            self.close()
            raise

    def call(self, request: Any, expect: type[R], *, timeout_s: float = 10.0) -> R:
        """The one reply to `request`. Raises what the peer raised, PeerLost, DeadlineExceeded."""
        for reply in self.stream(request, timeout_s=timeout_s):
            if isinstance(reply, expect):
                return reply
            raise PoolweaveError(f"{self.peer} answered {type(request).__name__} with {type(reply).__name__}")
        raise AssertionError("a stream ends with a reply or raises")

    def stream(self, request: Any, *, timeout_s: float) -> Iterator[Any]:
        """All replies to `request`, the last one final; `timeout_s` is for the whole. Raises as `call` does.

        Leaving the iterator early forgets the call; it does not stop the peer (send Cancel for that).
        """
        request_id = next(self._ids)
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        frames = self._connection.encode(request, request_id, timeout_s)
        with self._lock:
            if self._lost is not None:
                raise self._again(self._lost)
            self._pending[request_id] = inbox
        try:
            self._outbox.append(frames)
            self._poke()
            yield from self._replies(inbox, type(request).__name__, timeout_s)
        finally:
            with self._lock:
                self._pending.pop(request_id, None)

    def post(self, request: Any) -> None:
        """Send `request` and forget it: no reply is awaited, and a peer that has gone is no error."""
        self._outbox.append(self._connection.encode(request, next(self._ids)))
        self._poke()

    def close(self) -> None:
        """Idempotent; pending calls fail with PeerLost. Not from the client's own thread."""
        self._closing = True
        self._poke()
        self._thread.join()
        with self._lock:
            wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)

    def _replies(self, inbox: queue.SimpleQueue[Any], what: str, timeout_s: float) -> Iterator[Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                reply = inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise DeadlineExceeded(
                    f"{self.peer} did not finish {what} within {timeout_s:g} s; raise the timeout or look at its load",
                    peer=self.peer,
                    seconds=timeout_s,
                ) from None
            if isinstance(reply, PeerLost):
                raise self._again(reply)
            if isinstance(reply, Failure):
                raise reply.error.error()
            yield reply
            if not isinstance(reply, Emit):
                return

    @staticmethod
    def _again(error: PoolweaveError) -> PoolweaveError:
        """A fresh copy: one exception object must not be raised in two threads."""
        build, arguments = error.__reduce__()
        return cast(PoolweaveError, build(*arguments))

    def _poke(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        """The connection's thread: sends the outbox, hands replies to their calls, ends with the connection."""
        poller = zmq.Poller()
        for source in (*self._connection.sources, self._wake):
            poller.register(source, zmq.POLLIN)
        reason: str | None = None
        try:
            while reason is None and not self._closing:
                ready = dict(poller.poll())
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                while self._outbox:
                    self._connection.send(self._outbox.popleft())
                self._read()
                reason = self._connection.lost()
            self._read()  # what it said before it died
        finally:
            self._fail(self._connection.error(reason or "closed here"))
            self._connection.close()

    def _read(self) -> None:
        for request_id, reply in self._connection.read():
            with self._lock:
                inbox = self._pending.get(request_id)
            if inbox is not None:
                inbox.put(reply)

    def _fail(self, lost: PeerLost) -> None:
        with self._lock:
            self._lost = lost
            pending = list(self._pending.values())
        for inbox in pending:
            inbox.put(lost)
