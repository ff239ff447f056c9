"""PoolStore: the pool as a transfer engine sees it (the BlockStore protocol). Called from the engine's threads."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from poolweave.errors import OutOfBlocks, StaleHandle
from poolweave.mempool.allocator import Allocator
from poolweave.mempool.catalogue import Catalogue
from poolweave.mempool.space import BlockSpace
from poolweave.transfer import Incoming, KVLayout, Loan, Placement, Region
from poolweave.types import UInt64Array

_NONE = np.empty(0, np.uint64)


class PoolStore:
    """Lends blocks out of a pool and places incoming ones into it."""

    def __init__(self, space: BlockSpace, catalogue: Catalogue, allocator: Allocator) -> None:
        self._space = space
        self._catalogue = catalogue
        self._allocator = allocator
        self._mutex = threading.Lock()  # guards _loans
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
            self._space.table.lend(blocks, tiers, slots, unsealed)
        loan = Loan(blocks, tiers + np.uint8(1), slots)
        with self._mutex:
            self._loans[id(loan)] = loan
        return loan

    def sealed_layers(self, blocks: UInt64Array) -> npt.NDArray[np.uint16]:
        """How many layers of each are sealed, from the first on. Raises UnknownBlock, StaleHandle."""
        layers = np.empty(len(blocks), np.uint16)
        self._space.table.sealed_layers(blocks, layers)
        return layers

    def give_back(self, loan: Loan) -> None:
        """Raises StaleHandle for a loan that ended before."""
        with self._mutex:
            if self._loans.pop(id(loan), None) is None:
                raise StaleHandle("this loan was given back before")
        self._allocator.released(self._space.table.give_back(loan.blocks, loan.tiers - np.uint8(1), loan.slots))

    def place(self, incoming: Incoming) -> Placement:
        held = _NONE
        if incoming.tokens is not None:
            held = self._catalogue.match(incoming.tokens, self._catalogue.namespace_of(incoming.identity)).handles
            self._allocator.free(held[incoming.num_blocks :])
            held = held[: incoming.num_blocks]
        try:
            tenant = self._catalogue.tenant(self._space.index.namespace_of(incoming.identity))
            fresh = self._fresh(incoming, incoming.num_blocks - len(held), tenant)
        except BaseException:
            self._allocator.free(held)
            raise
        tiers, slots = self._space.locate(fresh)
        return Placement(incoming, held, fresh, tiers, slots)

    def commit(self, placement: Placement) -> UInt64Array:
        incoming, held, fresh = placement.incoming, placement.held, placement.fresh
        whole = incoming.num_tokens // self.layout.block_tokens
        blocks = np.concatenate((held, fresh))
        self._space.seal(fresh[: max(0, whole - len(held))])
        if incoming.private:
            self._space.table.set_private(fresh)
        if incoming.insert and incoming.tokens is not None:
            ns = self._catalogue.namespace_of(incoming.identity)
            self._catalogue.insert(incoming.tokens, blocks[:whole], ns)
        return blocks

    def release(self, blocks: UInt64Array) -> None:
        self._allocator.free(blocks)

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
