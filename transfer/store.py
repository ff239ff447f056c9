"""What the transfer engine needs of a pool: the Protocol it calls and the values that cross it.

The engine never allocates, matches or indexes; it asks a `BlockStore`. Calls come from the engine's threads, so a
store is thread-safe. Source: MemServe §4.4 (transfer steps).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from poolweave.transfer.layout import KVLayout
from poolweave.types import Int32Array, Tier, UInt64Array


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


@dataclass(frozen=True, slots=True)
class Loan:
    """Sealed blocks lent to a transfer: they keep one reference and their place until given back."""

    blocks: UInt64Array
    tiers: npt.NDArray[np.uint8]  # Tier values, one a block
    slots: Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """What a receiver is asked to take in. `num_tokens` counts the valid tokens of all `num_blocks` blocks."""

    num_blocks: int
    num_tokens: int
    identity: bytes  # Identity.digest, 16 bytes
    tokens: Int32Array | None = None  # given: blocks already indexed here are not pulled again
    insert: bool = False
    private: bool = False
    on_demand: Tier | None = Tier.HBM  # tiers that may be allocated from; None: `reserved` is used
    reserved: UInt64Array | None = None  # `fresh` is its first blocks, whose references pass to the placement


@dataclass(frozen=True, slots=True)
class Placement:
    """Where incoming blocks go: the first `len(held)` are here already, the rest are pulled into `fresh`."""

    incoming: Incoming
    held: UInt64Array  # matched and pinned
    fresh: UInt64Array  # allocated, not yet sealed
    tiers: npt.NDArray[np.uint8]  # of fresh
    slots: Int32Array  # of fresh


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
