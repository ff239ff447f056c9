"""Arena: pools that stand on one shared arena. Whole blocks stay where the sender has them, nothing is copied.

The receiver becomes a guest on the pages that the blocks lie in (their owner and the arena then keep them), and reads
the lease word afterwards: while it stands, the sender gives back its blocks later, and sees the guest. What cannot stay
(a partly filled block, a private copy, room in another tier) is copied out of the sender's pages, mapped for that long.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Sequence

import msgspec
import numpy as np

from poolweave.errors import ConfigError, ProtocolError, TransferFailed
from poolweave.transfer._native import Outcome, copy_blocks
from poolweave.transfer.layout import KVLayout
from poolweave.transfer.leases import TABLE_BYTES, slot_of
from poolweave.transfer.messages import Hello, Offer
from poolweave.transfer.one_sided import OneSided
from poolweave.transfer.regions import Memory, TierArray, grid_of, map_bytes, space_of
from poolweave.transfer.store import LenderWindow, Region
from poolweave.transfer.transport import Home, Lent, PullSlice, Source
from poolweave.types import Int32Array, UInt64Array

_OURS = 254  # names our own tier among those of the lender


class Stand(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which of the sender's tiers stand in an arena, and as which member of it; in Hello.data_address, as JSON."""

    tier: int
    arena: int
    member: tuple[int, int, int]


_STANDS = msgspec.json.Decoder(tuple[Stand, ...])


class Lender:
    """The sender's memory: `windows` on tiers in the arena, `mapped` ones beside it."""

    def __init__(self, memory: Memory, windows: dict[int, LenderWindow], words: UInt64Array) -> None:
        self.memory = memory
        self.windows = windows
        self.words = words

    def borrow(self, tiers: TierArray, slots: Int32Array) -> tuple[TierArray, Int32Array, list[int]] | None:
        """The blocks as places of `memory`, and the tiers that have rows to give back. None when it cannot be."""
        tiers, slots = tiers.copy(), slots.copy()
        lent: list[int] = []
        for tier, window in self.windows.items():
            chosen = np.flatnonzero(tiers == tier)
            if not len(chosen):
                continue
            rows = window.borrow(slots[chosen])
            if rows is None:
                self.give_back(tiers, slots, lent)
                return None
            tiers[chosen], slots[chosen] = _OURS - tier, rows
            lent.append(tier)
        return tiers, slots, lent

    def give_back(self, tiers: TierArray, slots: Int32Array, lent: Sequence[int]) -> None:
        for tier in lent:
            self.windows[tier].give_back(slots[tiers == _OURS - tier])


class ArenaSource(Source):
    """Shows, or copies, blocks of one sender."""

    is_instant = True

    def __init__(self, peer: str, lender: Lender, home: Home) -> None:
        self._peer = peer
        self._lender: Lender | None = lender
        self._home = home

    def lend(self, offer: Offer) -> Lent | None:
        lender = self._lender
        if lender is None or self._home.limits.hand_over == "off":
            return None
        return functools.partial(_adopt, lender, offer)

    def pull(self, slice_: PullSlice) -> Outcome:
        lender = self._lender
        if lender is None:
            return Outcome.REVOKED
        offer, first, count = slice_.offer, slice_.first, slice_.target.num_blocks
        self._require_in_place(offer, first, count)
        tiers = np.frombuffer(offer.tiers, np.uint8)[first : first + count]
        slots = np.frombuffer(offer.slots, np.int32)[first : first + count]
        borrowed = lender.borrow(tiers, slots)
        if borrowed is None:
            raise TransferFailed(
                f"{self._peer}'s pages cannot be mapped: it is gone, or this pool sees as many lenders as it can; "
                "connect it by its tcp address", peer=self._peer, reason="pages",
            )  # fmt: skip
        try:
            source = lender.memory.extents(borrowed[0], borrowed[1], slice_.windows)
            return copy_blocks(
                source, slice_.target, 0, count, self._home.limits.copy_threads, lender.words, slot_of(offer.offer),
                offer.offer, slice_.abort, slice_.hashes,
            )  # fmt: skip
        finally:
            lender.give_back(*borrowed)

    def lends(self, offer: Offer) -> bool:
        """Becoming a guest took the ledger's mutex, and so does the sender's look for guests, after it cleared the
        word: a word that still stands was read before that look, which then finds the guest.
        """
        lender = self._lender
        return lender is not None and bool(lender.words[slot_of(offer.offer)] == offer.offer)

    def close(self) -> None:
        lender, self._lender = self._lender, None
        for window in lender.windows.values() if lender is not None else ():
            window.close()

    def _require_in_place(self, offer: Offer, first: int, count: int) -> None:
        whole = offer.num_tokens // self._home.memory.layout.block_tokens - first
        if self._home.limits.hand_over == "require" and min(whole, count) > 0:
            raise TransferFailed(
                f"{min(whole, count)} whole blocks from {self._peer} would be copied and hand_over='require' refuses "
                "that: let the receiver allocate in HBM, without private or dst, raise its hbm, or set 'auto'",
                peer=self._peer, reason="hand_over",
            )  # fmt: skip


class ArenaTransport(OneSided):
    """Needs a store whose fastest tier stands in a shared arena. Raises ConfigError without."""

    in_place = True

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        if home.memory.host is None:
            raise ConfigError(
                "listening on arena needs a pool whose HBM tier stands in a shared arena: MemPool(hbm=Arena(...))",
                setting="listen", value="arena",
            )  # fmt: skip
        self._host: Region = home.memory.host

    def introduce(self, connection: socket.socket) -> tuple[str, tuple[int, ...]]:
        memory, fds, stands = self._home.memory, [], []
        for space, fd, joint in zip(memory.spaces, memory.fds, memory.joints, strict=True):
            fds.append(fd if joint is None else joint.table_fd)
            if joint is not None:
                stands.append(Stand(space.tier, joint.arena, joint.member))
        return msgspec.json.encode(stands).decode(), (*fds, self._home.leases.fd)

    def attach(self, hello: Hello, fds: Sequence[int], layout: KVLayout) -> ArenaSource:
        left = list(fds)
        try:
            return ArenaSource(hello.instance, self._meet(hello, left, layout), self._home)
        finally:
            for fd in left:
                os.close(fd)

    def _meet(self, hello: Hello, left: list[int], layout: KVLayout) -> Lender:
        """Map what the sender passed; what is mapped leaves `left`."""
        stands = self._stands(hello, layout)
        if len(left) != len(hello.spaces) + 1:
            raise ProtocolError(f"{len(left)} descriptors came for {len(hello.spaces)} tiers and a lease table")
        ours = grid_of(self._home.memory.layout, space_of(self._home.memory.layout, self._host), self._host.address)
        grids, views, windows = {}, [], {}
        joint = self._host.joint
        assert joint is not None
        assert joint.guests is not None
        for space in hello.spaces:
            stand = stands.get(space.tier)
            view = map_bytes(left.pop(0), space.nbytes if stand is None else 0)
            if stand is None:
                views.append(view)
                grids[space.tier] = grid_of(layout, space, view.ctypes.data)
            else:
                windows[space.tier] = joint.guests.open(stand.member, view.view(np.uint32))
                grids[_OURS - space.tier] = ours
        return Lender(Memory(grids, views), windows, map_bytes(left.pop(0), TABLE_BYTES).view(np.uint64))

    def _stands(self, hello: Hello, layout: KVLayout) -> dict[int, Stand]:
        """Where its tiers stand, by tier. Raises ConfigError when that is not where ours does."""
        try:
            stands = {stand.tier: stand for stand in _STANDS.decode(hello.data_address)}
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{hello.instance} does not say which arena it stands on: {error}") from error
        ours = self._home.memory
        strange = [stand.tier for stand in stands.values() if f"{stand.arena:016x}" != ours.arena]
        if strange or layout.block_bytes != ours.layout.block_bytes:
            what = "has a tier in another arena" if strange else f"has blocks of {layout.block_bytes} bytes"
            raise ConfigError(
                f"{hello.instance} {what}, ours stand in {ours.arena} with {ours.layout.block_bytes} bytes each; "
                "connect it by its tcp address", setting="listen", value="arena",
            )  # fmt: skip
        return stands


def _adopt(lender: Lender, offer: Offer, first: int, count: int) -> UInt64Array:
    """See Incoming.lent."""
    tiers = offer.tiers[first : first + count]
    window = lender.windows.get(tiers[0]) if tiers else None
    if window is None:
        return np.empty(0, np.uint64)
    alike = len(tiers) - len(tiers.lstrip(tiers[:1]))
    return window.adopt(np.frombuffer(offer.slots, np.int32, alike, 4 * first))
