"""The seam between the pull protocol and the ways bytes can move. One implementation a file in transports/."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from poolweave.transfer._native import Abort, Extents, Outcome, Window
from poolweave.transfer.layout import KVLayout
from poolweave.transfer.leases import LeaseTable
from poolweave.transfer.messages import Hello, Offer
from poolweave.transfer.offers import OpenOffer
from poolweave.transfer.regions import OwnMemory
from poolweave.transfer.resharding import Shard
from poolweave.transfer.store import MappedPeer
from poolweave.transfer.tls import Tls
from poolweave.types import UInt64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of data movement, from the engine's settings."""

    stall_s: float
    connect_timeout_s: float
    copy_threads: int
    connections: int
    secret: bytes | None
    hand_over: str = "auto"
    tls: Tls | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """What every transport of one engine shares."""

    instance: str
    epoch: int
    memory: OwnMemory
    leases: LeaseTable
    limits: Limits
    shard: Shard  # what the memory holds of the model
    data_address: Callable[[socket.socket, str], str]  # where a peer reached over that connection finds our data plane
    exchange: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSlice:
    """Blocks [first, first + target.num_blocks) of an offer, to be written into `target` and nowhere else.

    `hashes` (one a block, or None) is to be filled with the XXH3-64 of what was written. Of a growing offer's `step`,
    whose blocks begin at `step_first`, only the `windows` of each block move.
    """

    offer: Offer
    first: int
    target: Extents
    hashes: UInt64Array | None
    abort: Abort
    timeout_s: float
    step: int = 0
    step_first: int = 0
    windows: Sequence[Window] = ()


Lent = Callable[[int, int], UInt64Array]  # see Incoming.lent


class Source(Protocol):
    """A peer's memory as the receiver can read it; one for each connection. Thread-safe."""

    @property
    def is_instant(self) -> bool:
        """True when a pull never waits for the peer, so that a small one may run on the engine's own thread."""
        ...

    @property
    def mapped(self) -> MappedPeer | None:
        """The peer's memory where it can be read at any time while its lease words stand; None where it cannot."""
        return None

    def pull(self, slice_: PullSlice) -> Outcome:
        """Move the bytes. REVOKED when the lease ended before the last byte was read: then none of it is valid.

        Raises TransferFailed for stalls, cuts and malformed data. Ends at once when `abort` is set.
        """
        ...

    def lend(self, offer: Offer) -> Lent | None:
        """How blocks of the offer can be had without a copy; None where they cannot."""
        return None

    def lends(self, offer: Offer) -> bool:
        """Whether its lease stands, asked after blocks were had by lend(): then they stay valid."""
        return False

    def close(self) -> None:
        """Let go of the peer's memory or connections. Pulls under way end by their abort. Idempotent."""
        ...


class Transport(Protocol):
    """One way to move bytes, for one engine. `in_place`: what it brings stays where it is, and needs no checksums."""

    in_place: bool

    def introduce(self, connection: socket.socket) -> tuple[str, tuple[int, ...]]:
        """What a peer needs to reach our data plane: the text of Hello.data_address, and descriptors to send along."""
        ...

    def attach(self, hello: Hello, fds: Sequence[int], layout: KVLayout) -> Source:
        """Receiver's side: make the memory of the peer that says `hello` readable: blocks of `layout`, in its order.

        Takes `fds` over. Raises ProtocolError for what does not fit.
        """
        ...

    def publish(self, offer: OpenOffer, step: int = 0) -> None:
        """Sender's side: let the peer read the offer's blocks, or one step of a growing one, until revoke()."""
        ...

    def revoke(self, offer: OpenOffer) -> None:
        """After it returns no read of the offer's blocks can be taken for valid any more. Idempotent.

        The lease word has been cleared before.
        """
        ...

    def adopt(self, sock: socket.socket) -> None:
        """Sender's side: serve a data connection that a receiver opened. Takes `sock` over."""
        ...

    def close(self) -> None: ...
