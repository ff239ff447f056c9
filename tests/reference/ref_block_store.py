"""A small in-memory BlockStore: what the transfer engine's tests run against. Plain Python, no eviction.

Each tier is a memfd (or an anonymous mapping with `mappable=False`). References are counted, the index is a dict of
token prefixes, and check() asserts that every block is accounted for.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from poolweave.errors import NotSealed, OutOfBlocks, UnknownBlock
from poolweave.transfer import Incoming, KVLayout, Loan, Placement, Region
from poolweave.types import Tier, UInt64Array

_TIERS = (Tier.HBM, Tier.DRAM)


class ReferenceStore:
    """`num_slots` blocks in each tier. Handles are generation << 32 | tier index << 24 | slot."""

    def __init__(
        self, layout: KVLayout, num_slots: int = 32, *, mappable: bool = True, tiers: int = 2, device: Any = None
    ) -> None:  # fmt: skip
        """With a `device`, of the stand-in whose memory is this process's, HBM is said to lie there."""
        self._device = device
        mappable = mappable and device is None
        self._layout = layout
        self._lock = threading.RLock()
        self._num_slots = num_slots
        self._maps: list[mmap.mmap] = []
        self._fds: list[int] = []
        for _ in range(tiers):
            self._add_tier(mappable)
        self.bytes = [np.frombuffer(one, np.uint8) for one in self._maps]
        self._free = [list(range(num_slots)) for _ in range(tiers)]
        self._generation = 0
        self.references: Counter[int] = Counter()
        self.loans: Counter[int] = Counter()
        self.sealed: set[int] = set()
        self.layers: Counter[int] = Counter()  # sealed ones of blocks that are not sealed
        self.indexed: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.private: set[int] = set()
        self.commits = 0

    def _add_tier(self, mappable: bool) -> None:
        nbytes = self._num_slots * self._layout.block_bytes
        if not mappable:
            self._maps.append(mmap.mmap(-1, nbytes))
            self._fds.append(-1)
            return
        fd = os.memfd_create("reference-store")
        os.ftruncate(fd, nbytes)
        self._maps.append(mmap.mmap(fd, nbytes))
        self._fds.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
        os.close(fd)

    # --- what a test does ----------------------------------------------------------------------------------------

    def alloc(self, n: int, tier: Tier = Tier.HBM) -> UInt64Array:
        with self._lock:
            free = sum(len(self._free[i]) for i, one in enumerate(_TIERS[: len(self._free)]) if one in tier)
            if n > free:
                raise OutOfBlocks(f"need {n}, {free} free", needed=n, free=free, evictable=0, pinned=0)
            return np.array([self._take(tier) for _ in range(n)], np.uint64)

    def _take(self, tier: Tier) -> int:
        for i, one in enumerate(_TIERS[: len(self._free)]):
            if one in tier and self._free[i]:
                self._generation += 1
                handle = self._generation << 32 | i << 24 | self._free[i].pop(0)
                self.references[handle] = 1
                return handle
        raise AssertionError("counted as free before")

    def view(self, handle: int) -> npt.NDArray[np.generic]:
        """The KV of one block, `[layer, part, token, heads, dim]`."""
        i, slot = int(handle) >> 24 & 0xFF, int(handle) & 0xFFFFFF
        return self._layout.view(self.bytes[i], self._num_slots)[slot]

    def fill(self, blocks: UInt64Array, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for handle in blocks.tolist():
            view = self.view(handle)
            view[...] = rng.integers(0, 100, view.shape).astype(view.dtype)

    def seal(self, blocks: UInt64Array, layers: int | None = None) -> None:
        """All layers, or the first `layers`."""
        if layers is None or layers == self._layout.num_layers:
            self.sealed.update(blocks.tolist())
        else:
            for handle in blocks.tolist():
                self.layers[handle] = layers

    def make(self, n: int, seed: int = 0, tier: Tier = Tier.HBM) -> UInt64Array:
        """`n` sealed blocks of random KV, one reference each."""
        blocks = self.alloc(n, tier)
        self.fill(blocks, seed)
        self.seal(blocks)
        return blocks

    def index(self, tokens: npt.NDArray[np.int32], blocks: UInt64Array, identity: bytes = bytes(16)) -> None:
        with self._lock:
            for key, handle in zip(self._keys(tokens, identity), blocks.tolist(), strict=False):
                if key not in self.indexed:
                    self.indexed[key] = handle
                    self.references[handle] += 1

    def free_blocks(self) -> int:
        return sum(len(free) for free in self._free)

    def in_use(self) -> int:
        return len(self.references)

    def check(self) -> None:
        with self._lock:
            assert all(count > 0 for count in self.references.values())
            assert self.free_blocks() + len(self.references) == self._num_slots * len(self._free)
            assert set(self.indexed.values()) <= set(self.references)

    def close(self) -> None:
        for fd in self._fds:
            if fd >= 0:
                os.close(fd)
        self._fds.clear()

    def _keys(self, tokens: npt.NDArray[np.int32], identity: bytes) -> list[tuple[bytes, tuple[int, ...]]]:
        step = self._layout.block_tokens
        return [(identity, tuple(tokens[: end + step].tolist())) for end in range(0, len(tokens) - step + 1, step)]

    # --- BlockStore ----------------------------------------------------------------------------------------------

    @property
    def layout(self) -> KVLayout:
        return self._layout

    def regions(self) -> tuple[Region, ...]:
        devices = {Tier.HBM: self._device}
        return tuple(
            Region(tier, fd, view.ctypes.data, view.nbytes, self._num_slots, device=devices.get(tier))
            for tier, fd, view in zip(_TIERS, self._fds, self.bytes, strict=False)
        )

    def sealed_layers(self, blocks: UInt64Array) -> npt.NDArray[np.uint16]:
        with self._lock:
            every = self._layout.num_layers
            return np.array([every if h in self.sealed else self.layers[h] for h in blocks.tolist()], np.uint16)

    def lend(self, blocks: UInt64Array, *, unsealed: bool = False) -> Loan:
        with self._lock:
            for handle in blocks.tolist():
                if handle not in self.references:
                    raise UnknownBlock(f"no block {handle}", handle=handle)
                if handle not in self.sealed and not unsealed:
                    raise NotSealed(f"block {handle} is still written", handle=handle)
            for handle in blocks.tolist():
                self.references[handle] += 1
                self.loans[handle] += 1
            tiers, slots = self._places(blocks)
            return Loan(blocks, tiers, slots)

    def give_back(self, loan: Loan) -> None:
        with self._lock:
            for handle in loan.blocks.tolist():
                assert self.loans[handle] > 0, "given back twice"
                self.loans[handle] -= 1
        self.release(loan.blocks)

    def short_way(self, ours: object, peer: object) -> None:
        """It has none: everything goes step by step."""

    def place(self, incoming: Incoming) -> Placement:
        with self._lock:
            held: list[int] = []
            if incoming.tokens is not None:
                for key in self._keys(incoming.tokens, incoming.identity)[: incoming.num_blocks]:
                    if key not in self.indexed:
                        break
                    held.append(self.indexed[key])
            need = incoming.num_blocks - len(held)
            if incoming.reserved is not None:
                if need > len(incoming.reserved):
                    raise OutOfBlocks("reservation too small", needed=need, free=len(incoming.reserved))
                fresh = incoming.reserved[:need].copy()
            else:
                assert incoming.on_demand is not None
                fresh = self.alloc(need, incoming.on_demand)
            for handle in held:
                self.references[handle] += 1
            tiers, slots = self._places(fresh)
            return Placement(incoming, np.array(held, np.uint64), fresh, tiers, slots)

    def commit(self, placement: Placement) -> UInt64Array:
        with self._lock:
            self.commits += 1
            incoming = placement.incoming
            blocks = np.concatenate([placement.held, placement.fresh])
            whole = incoming.num_tokens // self._layout.block_tokens
            self.seal(blocks[:whole])
            if incoming.private:
                self.private.update(placement.fresh.tolist())
            if incoming.insert and incoming.tokens is not None:
                self.index(incoming.tokens, blocks[:whole], incoming.identity)
            return blocks

    def release(self, blocks: UInt64Array) -> None:
        with self._lock:
            for handle in blocks.tolist():
                assert self.references[handle] > 0, f"released {handle} once too often"
                self.references[handle] -= 1
                if not self.references[handle]:
                    del self.references[handle]
                    self.sealed.discard(handle)
                    self._free[handle >> 24 & 0xFF].append(handle & 0xFFFFFF)

    def _places(self, blocks: UInt64Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        tiers = np.array([_TIERS[h >> 24 & 0xFF].value for h in blocks.tolist()], np.uint8)
        slots = np.array([h & 0xFFFFFF for h in blocks.tolist()], np.int32)
        return tiers, slots
