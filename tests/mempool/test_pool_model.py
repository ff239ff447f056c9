"""The pool against its oracle: random operations over both tiers, bytes and invariants after each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ref_pool import PoolOracle, Prefix

from poolweave.errors import ConfigError, NotSealed, OutOfBlocks, StaleHandle, UnknownBlock
from poolweave.mempool import Blocks, MemPool, PoolConfig
from poolweave.transfer import KVLayout, Loan
from poolweave.types import Tier

LAYOUT = KVLayout(num_layers=1, kv_heads=1, head_dim=2, block_tokens=2, dtype="float32")
prompts = st.lists(st.integers(0, 1), min_size=2, max_size=11).map(tuple)
sizes = st.integers(3, 12)
tier_masks = st.sampled_from([Tier.HBM, Tier.DRAM, Tier.HBM | Tier.DRAM])


def blocks_of(handles: list[int]) -> Blocks:
    return Blocks(np.array(handles, np.uint64))


class PoolModel(RuleBasedStateMachine):
    @initialize(hbm=sizes, dram=st.integers(0, 8))
    def start(self, hbm: int, dram: int) -> None:
        self.has_dram = dram > 0
        block = LAYOUT.block_bytes
        config = PoolConfig(page_bytes=4096, copy_threads=1, max_hbm=16 * block, max_dram=16 * block)
        self.pool = MemPool(LAYOUT, hbm=hbm * block, dram=dram * block, config=config)
        self.oracle = PoolOracle(LAYOUT.block_tokens)
        self.store = self.pool._links._store
        self.loans: list[tuple[Loan, list[int]]] = []

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()

    def some_held(self, data: st.DataObject) -> list[int]:
        held = self.oracle.held
        return data.draw(st.lists(st.sampled_from(held), max_size=5)) if held else []

    @rule(n=st.integers(0, 6), tier=tier_masks)
    def alloc(self, n: int, tier: Tier) -> None:
        if not self.has_dram and tier == Tier.DRAM:
            with pytest.raises(ConfigError):
                self.pool.alloc(max(n, 1), tier)
            return
        before = [t for t in self.pool.stats().tiers.values() if t.tier in tier]
        free, room = sum(t.free for t in before), sum(t.free + t.evictable for t in before)
        try:
            handles = list(self.pool.alloc(n, tier))
        except OutOfBlocks:
            assert n > free
            assert n > room or self.oracle.held, "nothing is pinned, yet blocks that only the index holds did not go"
            return
        assert n <= room
        for handle, stamp in zip(handles, self.oracle.take(handles), strict=True):
            self.write(handle, stamp)

    def write(self, handle: int, stamp: int) -> None:
        one = blocks_of([handle])
        tier = Tier(int(self.pool.tiers(one)[0]))
        self.pool.view(tier)[self.pool.slots(one, tier)] = stamp

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        handles = self.some_held(data)
        if any(handles.count(handle) > self.oracle.refs[handle] for handle in handles):
            with pytest.raises(StaleHandle):
                self.pool.free(blocks_of(handles))
            return
        self.pool.free(blocks_of(handles))
        self.oracle.refs.subtract(handles)

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        handles = self.some_held(data)
        self.pool.retain(blocks_of(handles))
        self.oracle.refs.update(handles)

    @rule(data=st.data(), wrong=st.sampled_from(["freed", "zero", "forged"]))
    def wrong_handles_change_nothing(self, data: st.DataObject, wrong: str) -> None:
        alive = {*self.oracle.held, *self.oracle.indexed.values(), *(h for _, lent in self.loans for h in lent)}
        freed = [handle for handle in self.oracle.stamp if handle not in alive]
        bad = {"freed": freed[-1] if freed else 0, "zero": 0, "forged": 2**40 + 2**31}[wrong]
        handles = [*self.some_held(data), bad]
        for call in (self.pool.free, self.pool.retain, self.pool.seal, self.pool.tiers):
            with pytest.raises((UnknownBlock, StaleHandle)):
                call(blocks_of(handles))

    @rule(tokens=prompts, data=st.data())
    def insert(self, tokens: Prefix, data: st.DataObject) -> None:
        with self.pool.match(tokens) as hit:
            reused = list(hit.blocks)
            fresh = [h for h in self.oracle.held if self.oracle.place_of(h) is None and h not in reused]
            needed = len(tokens) // LAYOUT.block_tokens - len(reused)
            handles = [*reused, *fresh[:needed]]
            unsealed = set(handles) - self.oracle.sealed
            if unsealed and data.draw(st.booleans()):
                with pytest.raises(NotSealed):
                    self.pool.insert(tokens, blocks_of(handles))
                return
            self.pool.seal(blocks_of(handles))
            self.oracle.sealed.update(handles)
            result = self.pool.insert(tokens, blocks_of(handles))
            assert result.num_tokens == len(handles) * LAYOUT.block_tokens
            assert result.duplicates.tolist() == reused
            assert not len(result.surplus)
            self.oracle.insert(tokens, handles, len(reused))

    @rule(tokens=prompts, keep=st.booleans())
    def match(self, tokens: Prefix, keep: bool) -> None:
        with self.pool.match(tokens) as hit:
            self.check_hit(tokens, list(hit.blocks), hit.num_tokens)
            if keep:
                self.oracle.refs.update(list(hit.take()))

    def check_hit(self, tokens: Prefix, handles: list[int], num_tokens: int) -> None:
        assert num_tokens == len(handles) * LAYOUT.block_tokens
        assert len(handles) >= self.oracle.certain(tokens)
        assert handles == [self.oracle.indexed[prefix] for prefix in self.oracle.prefixes(tokens)[: len(handles)]]
        self.check_bytes(handles)

    def check_bytes(self, handles: list[int]) -> None:
        for handle, tier in zip(handles, self.pool.tiers(blocks_of(handles)).tolist(), strict=True):
            row = self.pool.view(Tier(tier))[self.pool.slots(blocks_of([handle]), Tier(tier))]
            assert row.min() == row.max() == self.oracle.stamp[handle]

    @rule(tokens=prompts)
    def delete(self, tokens: Prefix) -> None:
        before = len(self.pool._space.index)
        assert self.pool.delete(tokens) == before - len(self.pool._space.index)
        for prefix in reversed(self.oracle.prefixes(tokens)):  # what is left of it matches as before
            with self.pool.match(prefix) as hit:
                if hit.num_tokens < len(prefix):
                    self.oracle.indexed.pop(prefix, None)

    @precondition(lambda self: self.has_dram)
    @rule(n=st.integers(0, 5))
    def swap_out(self, n: int) -> None:
        history = self.pool.stats().tiers[Tier.HBM].historical
        assert self.pool.swap_out(n) <= min(n, history)

    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        handles = self.some_held(data)
        try:
            self.pool.swap_in(blocks_of(handles))
        except OutOfBlocks:
            return
        assert set(self.pool.tiers(blocks_of(handles)).tolist()) <= {Tier.HBM.value}

    @rule(hbm=sizes, dram=sizes)
    def resize(self, hbm: int, dram: int) -> None:
        self.pool.resize(hbm=hbm * LAYOUT.block_bytes, dram=dram * LAYOUT.block_bytes if self.has_dram else None)

    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        sealed = [h for h in self.some_held(data) if h in self.oracle.sealed]
        self.loans.append((self.store.lend(np.array(sealed, np.uint64)), sealed))

    @precondition(lambda self: self.loans)
    @rule()
    def give_back(self) -> None:
        loan, handles = self.loans.pop(0)
        by_tier = {region.tier: self.pool.view(region.tier) for region in self.store.regions()}
        for handle, tier, slot in zip(handles, loan.tiers.tolist(), loan.slots.tolist(), strict=True):
            assert by_tier[Tier(tier)][slot].max() == self.oracle.stamp[handle], "a lent place was written over"
        self.store.give_back(loan)
        with pytest.raises(StaleHandle):
            self.store.give_back(loan)

    @invariant()
    def all_is_kept(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        self.check_bytes(self.oracle.held)
        on_loan = {handle for _, handles in self.loans for handle in handles}
        tiers = self.pool.stats().tiers.values()
        assert sum(t.active for t in tiers) == len(set(self.oracle.held) | on_loan)
        for tier in tiers:
            used = tier.active + tier.historical + tier.limbo
            assert tier.free == max(0, tier.total - used)
            pages = -(-tier.total * LAYOUT.block_bytes // 4096) + tier.overhang
            assert tier.memory.held_bytes <= 4096 * pages


PoolModel.TestCase.settings = settings(stateful_step_count=40, suppress_health_check=list(HealthCheck))
TestPoolModel = PoolModel.TestCase
