"""The messages between an engine and a pool process, on the frames of the control protocol. Values only."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from poolweave.errors import ConfigError
from poolweave.serving.control.messages import Done, Failure
from poolweave.transfer import KVLayout


class Attach(msgspec.Struct, frozen=True, tag=True):
    """The first request of a connection; it needs no epoch. Answered by Attached, or Failure(LayoutMismatch).

    `instance`, `addresses`: where the engine's own pool takes transfers.
    """

    layout: KVLayout
    instance: str
    addresses: dict[str, str]


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Send what is kept of `tokens` (int32, little endian) to `instance`, under `tag`, if it is more than `have`.

    Answered by Sending, when the offer is made.
    """

    tag: bytes
    identity: bytes
    tokens: bytes
    have: int
    instance: str


class PoolState(msgspec.Struct, frozen=True, tag=True):
    """Answered by PoolFigures."""


class Attached(msgspec.Struct, frozen=True, tag=True):
    """`instance`, `addresses`: where the process's pool takes transfers."""

    instance: str
    addresses: dict[str, str]


class Sending(msgspec.Struct, frozen=True, tag=True):
    """0: there is nothing to send."""

    num_tokens: int


class PoolFigures(msgspec.Struct, frozen=True, tag=True):
    """Blocks indexed, held by anyone but the index, and lent to transfers now."""

    indexed: int
    active: int
    leased: int


PoolRequest: TypeAlias = Attach | Fetch | PoolState
PoolReply: TypeAlias = Attached | Sending | PoolFigures | Done | Failure


def pool_address(name: str) -> str:
    """Where the pool process `name` is asked: a socket without a file, freed when it dies. Raises ConfigError."""
    if not name or not all(c.isalnum() or c in "-_." for c in name) or len(name) > 64:
        raise ConfigError(
            f"pool name {name!r} must be 1 to 64 letters, digits, '-', '_' or '.'", setting="name", value=name
        )
    return f"ipc://@poolweave-pool-{name}"
