"""The serving side of the control protocol: one ROUTER socket, one thread, replies from any thread.

Knows frames and callers, not what a request means: that is the handler's.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import zmq

from poolweave.errors import AddressInUse, ConfigError, PeerLost, PoolweaveError
from poolweave.serving.control.endpoint import check_endpoint
from poolweave.serving.control.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Codec,
    Done,
    ErrorInfo,
    Failure,
    Header,
    Hello,
    Request,
)

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0  # a peer that is silent (its host is gone) for five of these is dropped
_PROBES_S = (0.0, 0.02, 0.1, 0.5, 1.5)  # after a connection has ended, when clients are tried, each after the last
_MAX_QUEUED = 100_000  # replies a client may lag behind before it counts as gone


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asked, and where replies go. `deadline` is of time.monotonic(), None for no limit. Any thread may use it."""

    client: bytes
    request_id: int
    deadline: float | None
    server: RpcServer = field(repr=False, compare=False)

    def reply(self, message: Any) -> None:
        """Queue `message` for the caller; a caller that has gone is reported through `on_gone`, never raised."""
        self.server.post(self, message)


Handler = Callable[[Caller, Any], None]


class RpcServer:
    """Binds at construction; `serve` runs in the one thread that may touch the socket.

    Raises AddressInUse naming the port and `setting`, ConfigError for an address that is none.
    """

    def __init__(
        self, listen: str, epoch: int, *, name: str, setting: str = "listen", accepts: Any = Request, hello: Any = Hello
    ) -> None:
        """`accepts`: the union of requests that it takes; `hello`: the one among them that needs no epoch."""
        check_endpoint(listen, setting, least_port=0)
        self.epoch = epoch
        self._name = name
        self._hello = hello
        self._codec = Codec(accepts)
        self._clients: set[bytes] = set()
        self._outbox: collections.deque[tuple[Caller, Any]] = collections.deque()
        self._stopping = False
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
            (zmq.SNDHWM, _MAX_QUEUED),
            (zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000)),
            (zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_S * 5000)),
        ):
            self._router.setsockopt(option, value)
        try:
            self._router.bind(listen)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise _bind_error(error, listen, setting) from error
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._probes: Iterator[float] = iter(())  # the waits before the next times that clients are tried
        self._probe_s = math.inf  # when they are tried next

    @property
    def address(self) -> str:
        """Where clients connect; the real port when `listen` asked for port 0."""
        endpoint = self._router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.rstrip(b"\0").decode()

    def serve(
        self,
        handle: Handler,
        *,
        on_gone: Callable[[bytes], None] = lambda client: None,
        tick: Callable[[], None] = lambda: None,
        tick_s: float | None = None,
    ) -> None:
        """Run until `stop`. `on_gone(client)` once a client has gone; `tick` every `tick_s`, after all that waited.

        A PoolweaveError of the handler becomes that request's Failure; any other exception too, and is logged.
        """
        poller = zmq.Poller()
        for source in (self._router, self._monitor, self._wake):
            poller.register(source, zmq.POLLIN)
        next_s = time.monotonic() if tick_s is not None else math.inf
        while not self._stopping:
            for source, _ in poller.poll(_wait_ms(min(next_s, self._probe_s))):
                if source is self._router:
                    self._receive(handle)
                elif source is self._monitor:
                    self._hear_of_ends()
                else:
                    self._drain_wake()
            self._probe()
            if tick_s is not None and time.monotonic() >= next_s:
                tick()
                next_s = time.monotonic() + tick_s
            self._flush(on_gone)

    def post(self, caller: Caller, message: Any) -> None:
        """Queue a reply; thread-safe. After `close` it is dropped."""
        self._outbox.append((caller, message))
        self._poke()

    def stop(self) -> None:
        """Let `serve` return; from any thread."""
        self._stopping = True
        self._poke()

    def close(self) -> None:
        """Idempotent. Replies not yet sent are dropped: their clients see the connection end."""
        if self._wake < 0:
            return
        wake, self._wake = self._wake, -1
        os.close(wake)
        self._router.disable_monitor()
        self._context.destroy(linger=0)

    def _poke(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _drain_wake(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return

    def _receive(self, handle: Handler) -> None:
        """All requests that wait now."""
        while True:
            try:
                client, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._clients.add(client)
            request_id = 0
            try:
                header = self._codec.header(frames)
                request_id = header.request_id
                deadline = time.monotonic() + header.timeout_s if header.timeout_s > 0 else None
                request = self._codec.body(frames)
                self._check_epoch(header, request)
                handle(Caller(client, request_id, deadline, self), request)
            except PoolweaveError as error:
                self.post(Caller(client, request_id, None, self), Failure(ErrorInfo.of(error)))
            except Exception as error:
                logger.exception("%s: request %d failed", self._name, request_id)
                self.post(Caller(client, request_id, None, self), Failure(ErrorInfo.of(error)))

    def _hear_of_ends(self) -> None:
        """Connections ended; ZeroMQ says neither whose, nor waits with saying so until the way to it is closed."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._monitor.recv_multipart(zmq.NOBLOCK)
        self._probes = iter(_PROBES_S)
        self._await_probe()

    def _probe(self) -> None:
        """When one is due: a reply to no request, which reaches every client but the gone."""
        if time.monotonic() < self._probe_s:
            return
        self._await_probe()
        for client in self._clients:
            self._outbox.append((Caller(client, 0, None, self), Done()))

    def _await_probe(self) -> None:
        """However late this thread was, a try does not stand for those that were to come after it."""
        self._probe_s = time.monotonic() + next(self._probes, math.inf)

    def _check_epoch(self, header: Header, request: Any) -> None:
        if header.epoch != self.epoch and not isinstance(request, self._hello):
            raise PeerLost(
                f"instance {self._name} restarted: the request is for epoch {header.epoch}, this is {self.epoch}; "
                "connect again",
                peer=self._name,
                part="control",
                reason="stale epoch",
            )

    def _flush(self, on_gone: Callable[[bytes], None]) -> None:
        while self._outbox:
            caller, message = self._outbox.popleft()
            header = Header(PROTOCOL, self.epoch, caller.request_id)
            try:
                frames = self._codec.encode(header, message)
            except PoolweaveError as error:
                frames = self._codec.encode(header, Failure(ErrorInfo.of(error)))
            try:
                self._router.send_multipart([caller.client, *frames], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in (errno.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                if caller.client in self._clients:
                    self._clients.discard(caller.client)
                    self._tell_gone(on_gone, caller.client)

    def _tell_gone(self, on_gone: Callable[[bytes], None], client: bytes) -> None:
        """What fails over a client that has gone must not end what serves the others."""
        try:
            on_gone(client)
        except Exception:
            logger.exception("%s: could not end what a client asked for that is gone", self._name)


def _wait_ms(until_s: float) -> int | None:
    return None if until_s == math.inf else max(0, math.ceil((until_s - time.monotonic()) * 1000))


def _bind_error(error: zmq.ZMQError, listen: str, setting: str) -> PoolweaveError:
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(
            f"{listen} is taken by another process; free that port or set {setting} to another one, "
            "port 0 picks a free one",
            address=listen,
            setting=setting,
        )
    return ConfigError(
        f"{setting}={listen!r} cannot be bound: {error}; write e.g. 'tcp://127.0.0.1:0'", setting=setting, value=listen
    )
