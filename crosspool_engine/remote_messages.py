"""How an engine and a weights rank on another host begin; after that they speak as host and worker do."""

from __future__ import annotations

from multiprocessing.connection import Connection

import msgspec

from poolweave.errors import ConfigError

_VERSION = 1


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine's first message: which FFN rank it wants here, and the sizes of the board both ends have."""

    rank: int
    sizes: dict[str, int]
    kernels: str
    version: int = _VERSION

    def __post_init__(self) -> None:
        if self.version != _VERSION:
            raise ConfigError(
                f"the engine speaks version {self.version}, this FFN host {_VERSION}: install the same poolweave",
                setting="version", value=self.version,
            )  # fmt: skip


def receive_hello(channel: Connection) -> Hello:
    return msgspec.json.decode(channel.recv_bytes(), type=Hello)


def send_hello(channel: Connection, hello: Hello) -> None:
    channel.send_bytes(msgspec.json.encode(hello))


def parse_address(address: str) -> tuple[str, int]:
    """`host:port`. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{address!r} is no host:port", setting="address", value=address)
    return host, int(port)
