"""DataLine: frames over a socket; and how a data connection to another engine is dialled and greeted."""

from __future__ import annotations

import secrets
import socket
import time

from poolweave.errors import PoolweaveError, ProtocolError, TransferFailed
from poolweave.transfer._native import GREETING_LIMIT, FrameDecoder, FrameEncoder
from poolweave.transfer.addresses import Address, tune
from poolweave.transfer.keys import greeting_key
from poolweave.transfer.messages import REPLIES, DataHello, Hello, Refused, decode, encode, revive
from poolweave.transfer.tls import tls_failure
from poolweave.transfer.transport import Home


class DataLine:
    """Frames over `sock`, which it owns. One thread at a time; bad bytes raise ProtocolError, then close it."""

    def __init__(self, sock: socket.socket, secret: bytes | None) -> None:
        key = greeting_key(secret) if secret is not None else None
        self.sock = sock
        self._encoder, self._decoder = FrameEncoder(key), FrameDecoder(GREETING_LIMIT, key)

    def send(self, payload: bytes, until: float) -> None:
        """Raises OSError, TimeoutError after the monotonic time `until`."""
        self.sock.settimeout(max(0.001, until - time.monotonic()))
        self.sock.sendall(self._encoder.encode(payload))

    def receive(self, until: float) -> bytes:
        """The next frame. Raises OSError, TimeoutError, ConnectionError when the peer has closed, ProtocolError."""
        while (payload := self._decoder.next()) is None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self.sock.settimeout(left)
            data = self.sock.recv(4096)
            if not data:
                raise ConnectionError("it closed the connection")
            self._decoder.feed(data)
        return payload

    @property
    def is_cut(self) -> bool:
        """Whether the peer has closed it; what it says next may be there already."""
        try:
            self.sock.setblocking(False)
            return not self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.sock.close()


def data_address(hello: Hello, scheme: str) -> Address:
    """Where the peer that says `hello` has its data plane. Raises ProtocolError when that is none of `scheme`."""
    address = Address.parse(hello.data_address)
    if address.scheme != scheme:
        raise ProtocolError(f"{hello.instance} gave {hello.data_address!r} for data over {scheme}")
    return address


def dial(home: Home, peer: str, epoch: int, address: Address) -> socket.socket:
    """A data connection to `peer`, greeted. Raises TransferFailed, and what the peer refuses it with."""
    limits = home.limits
    until = time.monotonic() + limits.connect_timeout_s
    try:
        sock = socket.create_connection((address.host, address.port), limits.connect_timeout_s)
    except OSError as error:
        raise TransferFailed(
            f"no data connection to {peer} at {address}: {error}; is its address reachable from here?",
            peer=peer,
            reason="connect",
        ) from error
    if limits.tls is not None:
        sock = limits.tls.dial(sock, address)
    line = DataLine(sock, limits.secret)
    try:
        tune(sock)
        line.send(encode(DataHello(home.instance, peer, epoch, secrets.token_bytes(16))), until)
        reply = decode(REPLIES, line.receive(until))
        if isinstance(reply, Refused):
            raise revive(reply.error, reply.message, reply.numbers, peer)
    except OSError as error:
        line.close()
        why = tls_failure(sock) or error
        raise TransferFailed(f"{peer} did not greet: {why}", peer=peer, reason="greeting") from error
    except PoolweaveError:
        line.close()
        raise
    return sock
