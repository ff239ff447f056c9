"""PoolStore: the pool as a transfer engine sees it (the BlockStore protocol). Called from the engine's threads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from poolweave.errors import OutOfBlocks, StaleHandle
from poolweave.mempool.allocator import Allocator
from poolweave.mempool.catalogue import Catalogue
from poolweave.mempool.quotas import NOBODY
from poolweave.mempool.short_way import ShortWay
from poolweave.mempool.space import BlockSpace
from poolweave.transfer import Incoming, KVLayout, Loan, MappedPeer, Placement, Region, Tiers
from poolweave.types import Tier, UInt64Array

_NONE = np.empty(0, np.uint64)
_NO_TIERS, _NO_SLOTS = np.empty(0, np.uint8), np.empty(0, np.int32)
_BASE = 1  # from the core's tier numbers to Tier values


class PoolStore:
    """Lends blocks out of a pool and places incoming ones into it."""

    def __init__(self, space: BlockSpace, catalogue: Catalogue, allocator: Allocator) -> None:
        self._space = space
        self._catalogue = catalogue
        self._allocator = allocator
        self._loans: dict[int, Loan] = {}  # outstanding, by id(): each can end once only

    @property
    def layout(self) -> KVLayout:
        return self._space.layout

    def regions(self) -> tuple[Region, ...]:
        return tuple(memory.region() for memory in self._space.tiers.values())

    def lend(self, blocks: UInt64Array, *, unsealed: bool = False) -> Loan:
        """`unsealed`: also blocks that are being written, to be read layer by layer as `sealed_layers` says."""
        tiers, slots = np.empty(len(blocks), np.uint8), np.empty(len(blocks), np.int32)
        with self._space.lock:
            self._space.table.lend(blocks, tiers, slots, unsealed, _BASE)
        loan = Loan(blocks, tiers, slots)
        self._loans[id(loan)] = loan
        return loan

    def sealed_layers(self, blocks: UInt64Array) -> npt.NDArray[np.uint16]:
        """How many layers of each are sealed, from the first on. Raises UnknownBlock, StaleHandle."""
        layers = np.empty(len(blocks), np.uint16)
        self._space.table.sealed_layers(blocks, layers)
        return layers

    def give_back(self, loan: Loan) -> None:
        """Raises StaleHandle for a loan that ended before."""
        if self._loans.pop(id(loan), None) is None:  # atomic, as is adding
            raise StaleHandle("this loan was given back before")
        handed = self._space.handed
        if handed is None:
            available = self._space.table.give_back(loan.blocks, loan.tiers, loan.slots, _BASE)
        else:
            available = handed.end(loan)
        self._allocator.released(available)

    def short_way(self, ours: Tiers, peer: MappedPeer) -> ShortWay | None:
        if not ShortWay.serves(self._space):
            return None
        return ShortWay(self._space, self._catalogue, self._allocator, ours, peer)

    def place(self, incoming: Incoming) -> Placement:
        placed = self._catalogue.place(incoming)
        if isinstance(placed, Placement):
            return placed
        held = placed
        try:
            ns = self._catalogue.namespace_of(incoming.identity, incoming.tenant)  # held until all is there
            tenant = self._catalogue.tenant(ns)
            handed = self._handed(incoming, len(held), tenant)
            fresh = self._beside(handed, incoming, len(held), tenant)
        except BaseException:
            self._allocator.free(held)
            raise
        if len(handed) == len(fresh):
            return Placement(incoming, held, fresh, _NO_TIERS, _NO_SLOTS, len(handed))
        tiers, slots = self._space.locate(fresh)
        return Placement(incoming, held, fresh, tiers, slots, len(handed))

    def commit(self, placement: Placement) -> UInt64Array:
        self._catalogue.commit(placement)
        held, fresh = placement.held, placement.fresh
        return np.concatenate((held, fresh)) if len(held) else fresh

    def release(self, blocks: UInt64Array) -> None:
        self._allocator.free(blocks)

    def _handed(self, incoming: Incoming, first: int, tenant: int) -> UInt64Array:
        """Whole blocks from `first` on that may lie where the sender has them; the others are copied."""
        count = incoming.num_tokens // self.layout.block_tokens - first
        on_demand = incoming.on_demand
        in_place = on_demand is not None and Tier.HBM in on_demand and not incoming.private and tenant == NOBODY
        if incoming.lent is None or count <= 0 or not in_place or not self._allocator.admit_guests(count):
            return _NONE
        return incoming.lent(first, count)

    def _beside(self, handed: UInt64Array, incoming: Incoming, num_held: int, tenant: int) -> UInt64Array:
        """`handed` and what must be had beside it. Raises OutOfBlocks; then they are free."""
        count = incoming.num_blocks - num_held - len(handed)
        if len(handed) and not count:
            return handed
        try:
            fresh = self._fresh(incoming, count, tenant)
        except BaseException:
            self._allocator.free(handed)
            raise
        return np.concatenate((handed, fresh))

    def _fresh(self, incoming: Incoming, count: int, tenant: int) -> UInt64Array:
        if incoming.on_demand is not None:
            return self._allocator.alloc(count, incoming.on_demand, tenant)
        reserved = _NONE if incoming.reserved is None else incoming.reserved
        if len(reserved) < count:
            raise OutOfBlocks(
                f"{count} blocks come in and {len(reserved)} were reserved for them; reserve more",
                needed=count, free=len(reserved), evictable=0, pinned=0,
            )  # fmt: skip
        return reserved[:count]
