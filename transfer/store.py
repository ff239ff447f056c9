"""What the transfer engine needs of a pool: the Protocol it calls and the values that cross it.

The engine never allocates, matches or indexes; it asks a `BlockStore`. Calls come from the engine's threads, so a
store is thread-safe. Source: MemServe §4.4 (transfer steps).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from poolweave.transfer._native import Device, Tiers
from poolweave.transfer.layout import KVLayout
from poolweave.transfer.messages import Offer
from poolweave.types import Int32Array, Tier, UInt64Array


class LenderWindow(Protocol):
    """A lender's blocks as one of its arena's other stores sees them. Thread-safe; for one connection."""

    def borrow(self, slots: Int32Array) -> Int32Array | None:
        """Make these of the lender's slots readable. -> slots of ours, to be given back; None when it cannot be."""
        ...

    def give_back(self, rows: Int32Array) -> None: ...

    def adopt(self, slots: Int32Array) -> UInt64Array:
        """Blocks of ours, a reference each, where the lender's lie: for as many as can be, from the first on."""
        ...

    def close(self) -> None:
        """The connection has ended; adopted blocks stay."""
        ...


class Guesthouse(Protocol):
    """A tier that can show and keep blocks of other stores of its arena where they lie."""

    def open(self, member: tuple[int, int, int], table: npt.NDArray[np.uint32]) -> LenderWindow: ...


@dataclass(frozen=True, slots=True)
class Joint:
    """That a region stands in an arena together with others.

    `arena` names it, `member` our part in it. `table_fd` (read-only, the store's) tells other members which page of the
    arena lies where in the region. `guests`: blocks of others may lie in this region.
    """

    arena: int
    member: tuple[int, int, int]
    table_fd: int
    guests: Guesthouse | None


@dataclass(frozen=True, slots=True)
class Region:
    """The memory of one tier that peers may read: block `slot` of an aggregated tier lies at `slot * block_bytes`.

    It spans the tier's maximum and stays the same for the store's life, so growth never moves it; slots without
    memory behind them are never lent or placed. `fd` is a read-only reopen of its memfd, whose byte 0 is the byte at
    `address` and whose size is at least `nbytes` (-1: the memory cannot be mapped by others); the store owns it.
    """

    tier: Tier
    fd: int
    address: int
    nbytes: int
    num_slots: int
    joint: Joint | None = None
    device: Device | None = None  # whose memory it is, where it is not the host's


class Loan(msgspec.Struct, frozen=True, eq=False):
    """Sealed blocks lent to a transfer: they keep one reference and their place until given back."""

    blocks: UInt64Array
    tiers: npt.NDArray[np.uint8]  # Tier values, one a block
    slots: Int32Array


class Payer(msgspec.Struct, frozen=True):
    """Whose quota pays for blocks: an identity's, and its tenant's where that is known."""

    identity: bytes = bytes(16)  # Identity.digest
    tenant: bytes = b""  # Identity.tenant_digest, or empty


class Incoming(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a receiver is asked to take in. `num_tokens` counts the valid tokens of all `num_blocks` blocks."""

    num_blocks: int
    num_tokens: int
    identity: bytes  # Identity.digest, 16 bytes
    tenant: bytes = b""  # whose quota pays: Identity.tenant_digest, or empty where nobody told it
    tokens: Int32Array | None = None  # given: blocks already indexed here are not pulled again
    insert: bool = False
    private: bool = False
    on_demand: Tier | None = Tier.HBM  # tiers that may be allocated from; None: `reserved` is used
    reserved: UInt64Array | None = None  # `fresh` is its first blocks, whose references pass to the placement
    # lent(first, count): blocks of ours where the sender's lie, a reference each, as many as can be: nothing is copied
    lent: Callable[[int, int], UInt64Array] | None = None


class Placement(msgspec.Struct, frozen=True, eq=False):
    """Where incoming blocks go: the first `len(held)` are here already, the rest are pulled into `fresh`."""

    incoming: Incoming
    held: UInt64Array  # matched and pinned
    fresh: UInt64Array  # allocated, not yet sealed
    tiers: npt.NDArray[np.uint8]  # of fresh; none when all of them were handed over
    slots: Int32Array
    handed: int = 0  # the first so many of fresh lie where the sender has them


@dataclass(frozen=True, slots=True)
class MappedPeer:
    """A peer's memory as it is mapped here, read-only, and its lease words. `keep` holds the mapping."""

    tiers: Tiers
    words: UInt64Array
    keep: object


@dataclass(slots=True)
class TakenIn:
    """The offer `number`, taken in whole: `num_pulled` of its blocks moved, in `num_calls` pieces.

    `blocks` are matched and pulled ones, one reference each for the caller; None for an offer without a tag.
    """

    blocks: UInt64Array | None
    num_pulled: int
    num_calls: int
    number: int


class ShortWay(Protocol):
    """Small offers of one peer taken in by one call, instead of place(), a pull and commit()."""

    def take(self, offer: Offer) -> TakenIn | None:
        """Match, pin, allocate, copy, look at lease and checksums, seal and index: all of it, or nothing (None)."""
        ...

    def take_message(self, message: bytes) -> TakenIn | None:
        """The same for an offer without a tag right out of its message; None also for any other message."""
        ...


class BlockStore(Protocol):
    """The pool as a transfer engine sees it."""

    @property
    def layout(self) -> KVLayout: ...

    def regions(self) -> tuple[Region, ...]:
        """All memory that a `Loan` or `Placement` can name, one region a tier."""
        ...

    def lend(self, blocks: UInt64Array, *, unsealed: bool = False) -> Loan:
        """Pin sealed blocks where they lie. Raises NotSealed, StaleHandle, UnknownBlock; then nothing is pinned.

        `unsealed`: also blocks that are being written, of which only what sealed_layers() says is read.
        """
        ...

    def sealed_layers(self, blocks: UInt64Array) -> npt.NDArray[np.uint16]:
        """How many layers of each are sealed, from the first on."""
        ...

    def give_back(self, loan: Loan) -> None:
        """End a loan; the last one lets the blocks be freed, moved or evicted again."""
        ...

    def short_way(self, ours: Tiers, peer: MappedPeer) -> ShortWay | None:
        """For small offers of that peer; None when this store has none. `ours` are its own regions."""
        ...

    def place(self, incoming: Incoming) -> Placement:
        """Match what is here, pin it, allocate the rest. Raises OutOfBlocks; then nothing is held."""
        ...

    def commit(self, placement: Placement) -> UInt64Array:
        """The bytes arrived and were checked: seal whole blocks, index them if asked. -> held + fresh, in order.

        A partial last block stays unsealed and is never indexed.

        The caller owns one reference on each block returned.
        """
        ...

    def release(self, blocks: UInt64Array) -> None:
        """Drop one reference on each block: of a placement that failed, or of an arrival nobody claimed."""
        ...
