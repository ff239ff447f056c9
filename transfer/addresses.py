"""Where an instance listens: `shm://name`, `inproc://name`, `arena://arena/name` and `tcp://host:port` as sockets.

Local addresses are abstract Unix sockets: nothing is left on disk, SIGKILL frees the name, and a second bind is
refused while the first owner lives. Knows no protocol.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass, replace

from poolweave.errors import AddressInUse, ConfigError, SystemCallFailed

SCHEMES = ("arena", "inproc", "shm", "nccl", "nixl", "tcp")  # in the order in which "auto" prefers them
_NETWORK = ("nccl", "nixl", "tcp")  # those that listen on a port
_BACKLOG = 1024
_MAX_NAME = 80  # an abstract name has 107 bytes, prefix included


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address. `str()` gives the text that peers pass to connect()."""

    scheme: str
    host: str  # the instance's name for shm, inproc and arena
    port: int = 0
    arena: str = ""  # which one, for arena

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ConfigError for unknown schemes, empty or overlong names and ports outside [0, 65535]."""
        scheme, separator, rest = text.partition("://")
        if not separator or scheme not in SCHEMES:
            known = ", ".join(f"{name}://" for name in SCHEMES)
            raise ConfigError(f"address {text!r} begins with none of {known}", setting="address", value=text)
        if scheme not in _NETWORK:
            if not rest or len(rest.encode()) > _MAX_NAME:
                raise ConfigError(f"{text!r} needs a name of 1 to {_MAX_NAME} bytes", setting="address", value=text)
            arena, _, name = rest.rpartition("/") if scheme == "arena" else ("", "", rest)
            return cls(scheme, name, arena=arena)
        host, separator, port = rest.rpartition(":")
        if not separator or not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(
                f"{text!r} is not {scheme}://host:port with a port up to 65535", setting="address", value=text
            )
        return cls(scheme, host.strip("[]"), int(port))

    def __str__(self) -> str:
        if self.is_local:
            return f"{self.scheme}://{self.arena}/{self.host}" if self.arena else f"{self.scheme}://{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    def on(self, arena: str) -> Address:
        """The same address, saying which arena the instance stands on, where that matters."""
        return replace(self, arena=arena) if self.scheme == "arena" else self

    @property
    def realm(self) -> str:
        """Who can be reached: the transport, and for "arena" which one it is."""
        return f"{self.scheme} {self.arena}" if self.arena else self.scheme

    @property
    def is_local(self) -> bool:
        """True when both ends are on one machine and share its kernel's memory."""
        return self.scheme not in _NETWORK

    @property
    def is_wildcard(self) -> bool:
        return self.host in ("0.0.0.0", "::")


def listen(address: Address, setting: str) -> tuple[socket.socket, Address]:
    """A non-blocking listening socket and the address it got (port 0 is replaced).

    Raises AddressInUse naming the address and `setting`, SystemCallFailed when the system refuses otherwise.
    """
    sock = _socket(address)
    try:
        if not address.is_local:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(_sockaddr(address))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"{address} is held by a live owner; choose another {setting}, or port 0 for any free one",
                address=str(address),
                setting=setting,
            ) from error
        raise SystemCallFailed(
            f"cannot listen on {address}: {error.strerror}; check {setting}", errno=error.errno
        ) from error
    if not address.is_local:
        address = Address(address.scheme, address.host, sock.getsockname()[1])
    return sock, address


def begin_dial(address: Address) -> socket.socket:
    """A non-blocking socket whose connection is under way or made. Raises OSError, BlockingIOError included.

    A Unix listener with a full backlog answers BlockingIOError: try again later.
    """
    sock = _socket(address)
    sock.setblocking(False)
    code = sock.connect_ex(_sockaddr(address))
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(code, os.strerror(code))
    return sock


def tune(sock: socket.socket) -> None:
    """Small messages at once, and a dead host noticed: TCP only, a no-op for Unix sockets."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _socket(address: Address) -> socket.socket:
    if address.is_local:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return socket.socket(family, socket.SOCK_STREAM)


def _sockaddr(address: Address) -> str | tuple[str, int]:
    if address.scheme == "shm":
        return f"\0poolweave/transfer/{address.host}"
    if address.scheme == "inproc":
        return f"\0poolweave/inproc/{os.getpid()}/{address.host}"
    if address.scheme == "arena":
        return f"\0poolweave/arena/{address.arena}/{address.host}"
    return address.host, address.port
