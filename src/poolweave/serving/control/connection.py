"""One connection to a server of the control protocol: a DEALER socket and its monitor, without a thread.

Who drives it (a thread of its own: RpcClient; an event loop: the HTTP door) polls `sources` and is its only user.
It lives as long as the peer's process: a restarted peer has a new epoch and gets a new connection.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from poolweave.errors import ConfigError, PeerLost, PoolweaveError
from poolweave.serving.control.messages import MAX_FRAME_BYTES, PROTOCOL, Codec, Header
from poolweave.serving.control.server import HEARTBEAT_S

logger = logging.getLogger(__name__)

HELLO_ID = 1  # the first request of every connection; its reply tells the epoch
_LOST_EVENTS = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class RpcConnection:
    """Connecting begins at construction, `lost` tells that it failed. Raises ConfigError for what is no address."""

    def __init__(self, address: str, *, peer: str, replies: Any) -> None:
        """`replies`: the union of messages that the peer may send."""
        self.peer = peer
        self.epoch = 0  # the peer's, once it was heard
        self._codec = Codec(replies)
        self._context = zmq.Context()
        try:
            self._dealer, self._monitor = self._connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"cannot connect to {address!r}: {error}; write e.g. 'tcp://127.0.0.1:7000'",
                setting="address",
                value=address,
            ) from error

    @property
    def sources(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """What to poll for input: the messages' socket and the monitor's."""
        return self._dealer, self._monitor

    def encode(self, request: Any, request_id: int, timeout_s: float = 0.0) -> list[bytes]:
        """Frames for `send`; callable from any thread. Raises RequestRefused for a message over the bound."""
        return self._codec.encode(Header(PROTOCOL, self.epoch, request_id, timeout_s), request)

    def send(self, frames: list[bytes]) -> None:
        """Never waits: without a connection the message is dropped, and `lost` says so next."""
        try:
            self._dealer.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return

    def read(self) -> Iterator[tuple[int, Any]]:
        """All replies that wait now, each with its request's id; those of another epoch and unreadable ones are not."""
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
            if header.request_id == HELLO_ID:
                self.epoch = header.epoch
            if header.epoch == self.epoch:
                yield header.request_id, reply

    def lost(self) -> str | None:
        """Why the connection has ended; None while it stands. Read once more after it: a peer's last words may wait."""
        try:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
        except zmq.Again:
            return None
        return "its process ended" if event == zmq.EVENT_DISCONNECTED else "nobody listens there"

    def error(self, reason: str) -> PeerLost:
        """What every call fails with once the connection has ended."""
        return PeerLost(
            f"lost instance {self.peer}: {reason}; start it again and connect anew",
            peer=self.peer,
            part="control",
            reason=reason,
        )

    def close(self) -> None:
        """Drop it, with all that was not sent. Idempotent."""
        if self._context.closed:
            return
        self._dealer.disable_monitor()
        self._context.destroy(linger=0)

    def _connect(self, address: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        dealer = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, -1),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
            (zmq.RCVHWM, 0),  # its driver always reads
            (zmq.SNDHWM, 0),  # and sending never waits: without a connection it fails at once
            (zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000)),
            (zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_S * 5000)),
        ):
            dealer.setsockopt(option, value)
        monitor = dealer.get_monitor_socket(_LOST_EVENTS)
        monitor.setsockopt(zmq.LINGER, 0)
        dealer.connect(address)
        return dealer, monitor
