"""Settings of a transfer engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from poolweave.errors import ConfigError
from poolweave.transfer.addresses import SCHEMES, Address
from poolweave.transfer.resharding import Shard
from poolweave.transfer.tls import TlsFiles
from poolweave.transfer.transports.inproc import Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """How one instance sends and receives. Raises ConfigError for settings out of range or transports unknown here.

    `listen`: "shm", "arena", "inproc", "tcp", "nixl" or, for pools on GPUs, "nccl" (any port of the loopback), or whole
    addresses; or several.
    `hand_over`: whether blocks that come over "arena" stay where the sender has them: "auto", where that can be; "off",
    they are copied; "require", a transfer fails that would copy a whole block.
    `advertise`: the tcp://, nixl:// or nccl:// address by which peers reach this instance, where it listens on another.
    `secret`: authenticates all control frames; the same on all instances, or on none.
    `tls`: certificates for connections over tcp, control and data; on all instances, or on none.
    `shard`: which part of a model this instance's pool holds, where it is cut over several; None: all of it.
    """

    listen: str | Sequence[str] = "shm"
    advertise: str | None = None
    secret: bytes | None = None
    tls: TlsFiles | None = None
    exchange: Exchange | None = None  # of the engines that meet over inproc://
    lease_s: float = 30.0
    connect_timeout_s: float = 5.0
    stall_s: float = 5.0  # a data connection that does not move this long has failed
    checksums: bool = True
    hand_over: Literal["auto", "off", "require"] = "auto"
    pull_workers: int = 4
    copy_threads: int = 2  # a large copy
    connections: int = 2  # data connections to a peer (tcp)
    max_in_flight_bytes: int = 4 << 30  # to one peer; further offers wait for their turn
    shard: Shard | None = None
    spin_s: float = 1e-4  # how long to look for the next message before sleeping, where that pays; 0: never

    def __post_init__(self) -> None:
        for name in ("lease_s", "connect_timeout_s", "stall_s"):
            if not 0 < getattr(self, name) < 1e6:
                raise ConfigError(f"{name} must be positive seconds, got {getattr(self, name)!r}", setting=name)
        for name, most in (
            ("pull_workers", 256),
            ("copy_threads", 64),
            ("connections", 64),
            ("max_in_flight_bytes", 1 << 60),
        ):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must lie in [1, {most}], got {getattr(self, name)!r}", setting=name)
        if not 0 <= self.spin_s <= 0.01:
            raise ConfigError(f"spin_s must lie in [0, 0.01] seconds, got {self.spin_s!r}", setting="spin_s")
        if self.hand_over not in ("auto", "off", "require"):
            raise ConfigError(
                f"hand_over={self.hand_over!r} is none of auto, off, require", setting="hand_over", value=self.hand_over
            )
        if self.secret is not None and not isinstance(self.secret, bytes):
            raise ConfigError(f"a secret is bytes, got {type(self.secret).__name__}", setting="secret")
        if self.secret is not None and len(self.secret) < 16:
            raise ConfigError(f"a secret needs at least 16 bytes, got {len(self.secret)}", setting="secret")
        if self.advertise is not None and Address.parse(self.advertise).is_local:
            raise ConfigError(
                "advertise is a tcp://, nixl:// or nccl:// address", setting="advertise", value=self.advertise
            )
        self.doors("whoever")  # says now what is no address, not at the first transfer

    def doors(self, instance: str) -> tuple[Address, ...]:
        """The addresses to listen on, with shorthands written out."""
        texts = [self.listen] if isinstance(self.listen, str) else list(self.listen)
        doors = tuple(Address.parse(_spell_out(text, instance)) for text in texts)
        schemes = [door.scheme for door in doors]
        if not doors or len(set(schemes)) != len(schemes):
            raise ConfigError(f"listen={texts} must name one address a transport", setting="listen", value=str(texts))
        for other, name in (("nixl", "NIXL"), ("nccl", "NCCL")):
            if self.tls is not None and other in schemes:
                raise ConfigError(
                    f"tls does not cover what {name} moves; listen on tcp, or leave tls out", setting="tls"
                )
        return doors


def _spell_out(text: str, instance: str) -> str:
    if "://" in text:
        return text
    if text not in SCHEMES:
        raise ConfigError(
            f"transport {text!r} is not available here; choose from {', '.join(SCHEMES)}", setting="listen", value=text
        )
    return f"{text}://{instance}" if text in ("arena", "inproc", "shm") else f"{text}://127.0.0.1:0"
