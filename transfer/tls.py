"""TLS for connections over a network: both sides prove themselves, and nobody reads what passes. Optional.

Each connection has a thread of its own (tls_relay.py), so that the data plane's native code stays as it is. That costs
a part of the speed: docs/transfer_protocol.md has figures.
"""

from __future__ import annotations

import functools
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from poolweave.errors import ConfigError
from poolweave.transfer.addresses import Address, tune
from poolweave.transfer.tls_relay import TlsEnd, TlsRelay, Wrap

_JOIN_S = 5.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: our certificate (with what links it to the authority), its key, and the authority of all peers."""

    cert: str | Path
    key: str | Path
    ca: str | Path


def tls_failure(sock: socket.socket) -> str | None:
    """Why TLS ended this connection; None when it did not, or there is none."""
    return sock.failure if isinstance(sock, TlsEnd) else None


class Tls:
    """The identity of one engine, and its connections. Thread-safe. Raises ConfigError for files that are not right."""

    def __init__(self, files: TlsFiles) -> None:
        self._dialling = _context(ssl.PROTOCOL_TLS_CLIENT, files)
        self._accepting = _context(ssl.PROTOCOL_TLS_SERVER, files)
        self._accepting.verify_mode = ssl.CERT_REQUIRED
        self._mutex = threading.Lock()
        self._relays: set[TlsRelay] = set()

    def dial(self, sock: socket.socket, address: Address) -> TlsEnd:
        """Of a connection that is made or under way to `address`, whose host the peer's certificate must name."""
        return self._begin(sock, functools.partial(self._dialling.wrap_bio, server_hostname=address.host))

    def accept(self, sock: socket.socket) -> TlsEnd:
        """Of a connection that came in."""
        return self._begin(sock, functools.partial(self._accepting.wrap_bio, server_side=True))

    def close(self) -> None:
        """Ends all connections. Idempotent."""
        with self._mutex:
            relays = list(self._relays)
        for relay in relays:
            relay.cut()
        until = time.monotonic() + _JOIN_S
        for relay in relays:
            relay.thread.join(max(0.0, until - time.monotonic()))
            relay.drop()

    def _begin(self, sock: socket.socket, wrap: Wrap) -> TlsEnd:
        tune(sock)
        sock.setblocking(False)
        relay = TlsRelay(sock, wrap, self._ended)
        with self._mutex:
            self._relays.add(relay)
        relay.thread.start()
        return relay.end

    def _ended(self, relay: TlsRelay) -> None:
        with self._mutex:
            self._relays.discard(relay)


def _context(protocol: ssl._SSLMethod, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(files.cert, files.key)
    except (OSError, ValueError) as error:
        message = f"tls.cert: {files.cert} with the key {files.key} cannot be used: {error}"
        raise ConfigError(message, setting="tls.cert", value=str(files.cert)) from error
    try:
        context.load_verify_locations(files.ca)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tls.ca: {files.ca} cannot be used: {error}", setting="tls.ca", value=str(files.ca)
        ) from error
    return context
