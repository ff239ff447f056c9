"""The calling side of the control protocol: one DEALER socket and one thread a peer, calls from any thread.

A connection lives as long as its peer's process. When that ends, everything pending fails with PeerLost and so does
every later call: a restarted peer has a new epoch and gets a new client.
"""

from __future__ import annotations

import collections
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from poolweave.errors import ConfigError, DeadlineExceeded, PeerLost, PoolweaveError
from poolweave.serving.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Codec,
    Emit,
    Failure,
    Header,
    Hello,
    Reply,
    Request,
    Welcome,
)
from poolweave.serving.rpc_server import HEARTBEAT_S

logger = logging.getLogger(__name__)

_LOST_EVENTS = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
R = TypeVar("R")


class RpcClient:
    """Connected and welcomed once constructed: `welcome` says who the peer is.

    `peer` is the name used in errors. Raises PeerLost when nobody listens at `address`, DeadlineExceeded when
    somebody does but says nothing, ConfigError for an address that is none.
    """

    def __init__(self, address: str, *, peer: str, timeout_s: float = 10.0) -> None:
        self.peer = peer
        self.epoch = 0
        self._codec = Codec(Reply)
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # guards _pending, _lost
        self._pending: dict[int, queue.SimpleQueue[Reply | PoolweaveError]] = {}
        self._outbox: collections.deque[list[bytes]] = collections.deque()
        self._lost: PoolweaveError | None = None
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context()
        try:
            self._dealer, self._monitor = self._connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            os.close(self._wake)
            raise ConfigError(
                f"cannot connect to {address!r}: {error}; write e.g. 'tcp://127.0.0.1:7000'",
                setting="address",
                value=address,
            ) from error
        self._thread = threading.Thread(target=self._run, name=f"rpc-{peer}", daemon=True)
        self._thread.start()
        try:
            self.welcome = self.call(Hello(), Welcome, timeout_s=timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def lost(self) -> bool:
        """True once the peer has gone."""
        return self._lost is not None

    def require(self) -> None:
        """Raises PeerLost when the peer has gone."""
        with self._lock:
            if self._lost is not None:
                raise self._again(self._lost)

    def call(self, request: Request, expect: type[R], *, timeout_s: float = 10.0) -> R:
        """The one reply to `request`. Raises what the peer raised, PeerLost, DeadlineExceeded."""
        for reply in self.stream(request, timeout_s=timeout_s):
            if isinstance(reply, expect):
                return reply
            raise PoolweaveError(f"{self.peer} answered {type(request).__name__} with {type(reply).__name__}")
        raise AssertionError("a stream ends with a reply or raises")

    def stream(self, request: Request, *, timeout_s: float) -> Iterator[Reply]:
        """All replies to `request`, the last one final; `timeout_s` is for the whole. Raises as `call` does.

        Leaving the iterator early forgets the call; it does not stop the peer (send Cancel for that).
        """
        request_id = next(self._ids)
        inbox: queue.SimpleQueue[Reply | PoolweaveError] = queue.SimpleQueue()
        frames = self._codec.encode(Header(PROTOCOL, self.epoch, request_id, timeout_s), request)
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

    def post(self, request: Request) -> None:
        """Send `request` and forget it: no reply is awaited, and a peer that has gone is no error."""
        self._outbox.append(self._codec.encode(Header(PROTOCOL, self.epoch, next(self._ids)), request))
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

    def _replies(self, inbox: queue.SimpleQueue[Any], what: str, timeout_s: float) -> Iterator[Reply]:
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
            if isinstance(reply, PoolweaveError):
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

    def _connect(self, address: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        dealer = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, -1),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
            (zmq.RCVHWM, 0),  # the thread below always reads
            (zmq.SNDHWM, 0),  # and sending never waits: without a connection it fails at once
            (zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000)),
            (zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_S * 5000)),
        ):
            dealer.setsockopt(option, value)
        monitor = dealer.get_monitor_socket(_LOST_EVENTS)
        monitor.setsockopt(zmq.LINGER, 0)
        dealer.connect(address)
        return dealer, monitor

    def _poke(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        """The socket's thread: sends the outbox, hands replies to their calls, ends with the connection."""
        poller = zmq.Poller()
        for source in (self._dealer, self._monitor, self._wake):
            poller.register(source, zmq.POLLIN)
        reason = "closed here"
        try:
            while not self._closing:
                ready = dict(poller.poll())
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._send()
                self._read()
                if self._monitor in ready:
                    event = parse_monitor_message(self._monitor.recv_multipart())["event"]
                    reason = "its process ended" if event == zmq.EVENT_DISCONNECTED else "nobody listens there"
                    self._read()  # what it said before it died
                    break
        finally:
            self._fail(reason)
            self._dealer.disable_monitor()
            self._context.destroy(linger=0)

    def _send(self) -> None:
        while self._outbox:
            try:
                self._dealer.send_multipart(self._outbox.popleft(), zmq.NOBLOCK)
            except zmq.Again:  # no connection any more: the monitor says so next
                return

    def _read(self) -> None:
        while True:
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                header = self._codec.header(frames)
                reply = self._codec.body(frames)
            except PoolweaveError as error:
                logger.warning("dropped a message of %s: %s", self.peer, error)
                continue
            if isinstance(reply, Welcome):
                self.epoch = header.epoch
            with self._lock:
                inbox = self._pending.get(header.request_id)
            if inbox is not None and header.epoch == self.epoch:
                inbox.put(reply)

    def _fail(self, reason: str) -> None:
        lost = PeerLost(
            f"lost instance {self.peer}: {reason}; start it again and connect anew",
            peer=self.peer,
            part="control",
            reason=reason,
        )
        with self._lock:
            self._lost = lost
            pending = list(self._pending.values())
        for inbox in pending:
            inbox.put(lost)
