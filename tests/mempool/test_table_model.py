"""The block table against its oracle: references, seals, the index's share, loans, moves, mirrors, limits, quotas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ref_block_table import LAYERS, RefBlock, TableOracle

from poolweave.errors import ConfigError, NotSealed, PrivateBlock, StaleHandle, UnknownBlock
from poolweave.mempool._native import BlockTable

NO_LIMIT = 2**64 - 1
picks = st.lists(st.integers(0, 1000), min_size=1, max_size=4, unique=True)
Loan = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]


def array(handles: list[int]) -> np.ndarray[Any, Any]:
    return np.array(handles, np.uint64)


class TableModel(RuleBasedStateMachine):
    @initialize(limits=st.tuples(st.integers(2, 8), st.integers(0, 6)), quota=st.integers(0, 4))
    def start(self, limits: tuple[int, int], quota: int) -> None:
        self.table = BlockTable(*limits, 77, LAYERS)
        self.table.set_tenants(2)
        self.table.set_quota(1, quota, NO_LIMIT, NO_LIMIT)
        self.oracle = TableOracle(limits, quota)
        self.loans: list[Loan] = []
        self.gone: list[int] = []

    def pick(self, which: list[int]) -> list[int]:
        live = sorted(self.oracle.blocks)
        return sorted({live[i % len(live)] for i in which}) if live else []

    def of(self, handles: list[int]) -> list[RefBlock]:
        return [self.oracle.blocks[handle] for handle in handles]

    def settle(self) -> None:
        before = set(self.oracle.blocks)
        self.oracle.settle()
        self.gone += sorted(before - set(self.oracle.blocks))

    @rule(count=st.integers(0, 5), mask=st.integers(1, 3), tenant=st.integers(0, 1))
    def alloc(self, count: int, mask: int, tenant: int) -> None:
        out = np.zeros(count, np.uint64)
        places = self.oracle.alloc_places(count, mask, tenant)
        assert self.table.alloc(out, mask, tenant) == (places is not None)
        for handle, (tier, slot) in zip(out.tolist(), places or [], strict=False):
            assert handle not in self.oracle.blocks
            self.oracle.blocks[handle] = RefBlock(tier, slot, tenant)

    @rule(which=picks)
    def free(self, which: list[int]) -> None:
        chosen = self.pick(which)
        if all(block.own for block in self.of(chosen)):
            self.table.free(array(chosen))
            for block in self.of(chosen):
                block.own -= 1
            self.settle()
        else:
            with pytest.raises(StaleHandle):
                self.table.free(array(chosen))

    @rule(which=picks)
    def retain(self, which: list[int]) -> None:
        chosen = self.pick(which)
        self.table.retain(array(chosen))
        for block in self.of(chosen):
            block.own += 1

    @rule(which=picks, first=st.integers(0, LAYERS), count=st.integers(0, LAYERS))
    def seal(self, which: list[int], first: int, count: int) -> None:
        chosen, last = self.pick(which), first + count
        blocks = self.of(chosen)
        if last <= LAYERS and all(first <= block.layers for block in blocks):
            self.table.seal_layers(array(chosen), first, last)
            for block in blocks:
                block.layers = max(block.layers, last)
        else:
            with pytest.raises(ConfigError):
                self.table.seal_layers(array(chosen), first, last)

    @rule(which=picks)
    def index(self, which: list[int]) -> None:
        chosen = [h for h in self.pick(which) if self.oracle.blocks[h].sealed and not self.oracle.blocks[h].indexed]
        self.table.index(array(chosen))
        for block in self.of(chosen):
            block.indexed = True

    @rule(which=picks)
    def unindex(self, which: list[int]) -> None:
        chosen = [h for h in self.pick(which) if self.oracle.blocks[h].indexed]
        self.table.unindex(array(chosen))
        for block in self.of(chosen):
            block.indexed = False
        self.settle()

    @rule(which=picks, unsealed=st.booleans())
    def lend(self, which: list[int], unsealed: bool) -> None:
        chosen = self.pick(which)
        tiers, slots = np.empty(len(chosen), np.uint8), np.empty(len(chosen), np.int32)
        blocks = self.of(chosen)
        if any(block.private for block in blocks) or (not unsealed and not all(block.sealed for block in blocks)):
            with pytest.raises((NotSealed, PrivateBlock)):
                self.table.lend(array(chosen), tiers, slots, unsealed)
            return
        self.table.lend(array(chosen), tiers, slots, unsealed)
        for block in blocks:
            block.loans += 1
        assert list(zip(tiers.tolist(), slots.tolist(), strict=True)) == [(b.tier, b.slot) for b in blocks]
        self.loans.append((array(chosen), tiers, slots))

    @precondition(lambda self: self.loans)
    @rule(which=st.integers(0, 100))
    def give_back(self, which: int) -> None:
        handles, tiers, slots = self.loans.pop(which % len(self.loans))
        self.table.give_back(handles, tiers, slots)
        for handle, tier, slot in zip(handles.tolist(), tiers.tolist(), slots.tolist(), strict=True):
            self.oracle.blocks[handle].loans -= 1
            if (tier, slot) in self.oracle.limbo:
                loans, tenant = self.oracle.limbo.pop((tier, slot))
                if loans > 1:
                    self.oracle.limbo[tier, slot] = (loans - 1, tenant)
        self.settle()

    def loans_at(self, tier: int, slot: int) -> int:
        return sum((tier, slot) in zip(tiers.tolist(), slots.tolist(), strict=True) for _, tiers, slots in self.loans)

    @rule(which=picks, to_tier=st.integers(0, 1), commit=st.booleans())
    def move(self, which: list[int], to_tier: int, commit: bool) -> None:
        chosen = [h for h in self.pick(which) if self.oracle.blocks[h].tier != to_tier]
        tiers = np.empty(len(chosen), np.uint8)
        slots, to = np.empty((2, len(chosen)), np.int32)
        if any(block.loans and not block.sealed for block in self.of(chosen)):
            with pytest.raises(NotSealed):
                self.table.begin_move(array(chosen), to_tier, tiers, slots, to)
            return
        free = self.oracle.free(to_tier)
        charged = sum(block.tenant for block in self.of(chosen)) if to_tier == 0 else 0
        fits = len(chosen) <= len(free) and charged <= max(0, self.oracle.quota - len(self.oracle.used(0, 1)))
        assert self.table.begin_move(array(chosen), to_tier, tiers, slots, to) == fits
        if not fits:
            return
        assert to.tolist() == free[: len(chosen)]
        (self.table.commit_move if commit else self.table.abort_move)(array(chosen), to_tier, to)
        for block, slot in zip(self.of(chosen), to.tolist(), strict=True):
            if commit:
                self.oracle.leave(block, self.loans_at(block.tier, block.slot))
                block.tier, block.slot = to_tier, slot
                block.mirror = None

    @rule(which=picks, commit=st.booleans())
    def mirror(self, which: list[int], commit: bool) -> None:
        chosen = self.pick(which)
        able = [
            h for h, b in zip(chosen, self.of(chosen), strict=True) if b.tier == 0 and b.sealed and b.mirror is None
        ]
        free = self.oracle.free(1)
        got, slots, to = np.empty(len(chosen), np.uint64), *np.empty((2, len(chosen)), np.int32)
        count = self.table.begin_mirrors(array(chosen), got, slots, to)
        assert got[:count].tolist() == able[: len(free)]
        assert to[:count].tolist() == free[: len(able)]
        self.table.end_mirrors(got[:count], to[:count], commit)
        for block, slot in zip(self.of(got[:count].tolist()), to[:count].tolist(), strict=True):
            block.mirror = slot if commit else None

    @rule(which=picks)
    def demote(self, which: list[int]) -> None:
        chosen = self.pick(which)
        rest = self.table.demote_mirrored(array(chosen))
        assert rest == [h for h in chosen if self.oracle.blocks[h].mirror is None]
        for block in self.of(chosen):
            if block.mirror is not None:
                self.oracle.leave(block, self.loans_at(block.tier, block.slot))
                block.tier, block.slot, block.mirror = 1, block.mirror, None

    @rule(count=st.integers(0, 3), start=st.integers(0, 4))
    def drop_mirrors(self, count: int, start: int) -> None:
        mirrors = [(b.mirror, h) for h, b in self.oracle.blocks.items() if b.mirror is not None]
        there = sorted((pair for pair in mirrors if pair[0] >= start), reverse=True)
        assert self.table.drop_mirrors(count, start) == min(count, len(there))
        for _, handle in there[:count]:
            self.oracle.blocks[handle].mirror = None

    @rule(tier=st.integers(0, 1), limit=st.integers(0, 10))
    def resize(self, tier: int, limit: int) -> None:
        self.table.set_limit(tier, limit)
        self.oracle.limits[tier] = limit

    @precondition(lambda self: self.gone)
    @rule(which=st.integers(0, 1000))
    def use_what_is_gone(self, which: int) -> None:
        handles = array([self.gone[which % len(self.gone)], *self.pick([which])])
        for call in (self.table.free, self.table.retain, self.table.seal, self.table.unindex):
            with pytest.raises((StaleHandle, UnknownBlock)):
                call(handles)

    @invariant()
    def agrees(self) -> None:
        self.table.check()
        assert self.table.num_live == len(self.oracle.blocks)
        for tier in (0, 1):
            counts = self.table.counts(tier)
            expected = self.oracle.counts(tier)
            assert {name: getattr(counts, name) for name in expected} == expected
            assert self.table.tenant(1).used[tier] == len(self.oracle.used(tier, 1))
        assert self.table.tenant(1).used[0] <= self.oracle.quota
        handles = sorted(self.oracle.blocks)
        tiers, slots = np.empty(len(handles), np.uint8), np.empty(len(handles), np.int32)
        layers = np.empty(len(handles), np.uint16)
        self.table.locate(array(handles), tiers, slots)
        self.table.sealed_layers(array(handles), layers)
        found = list(zip(tiers.tolist(), slots.tolist(), layers.tolist(), strict=True))
        assert found == [(b.tier, b.slot, b.layers) for b in self.of(handles)]


TestTableModel = TableModel.TestCase
TestTableModel.settings = settings(stateful_step_count=40)
