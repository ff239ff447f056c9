"""A tier's memory against its oracle: rows keep their bytes while it grows and shrinks around those in use."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from poolweave.mempool import Arena, PoolConfig
from poolweave.mempool.shared_tier import SharedTierMemory
from poolweave.mempool.tiers import TierMemory, TierSize
from poolweave.transfer import KVLayout
from poolweave.types import Tier

PAGE = 4096
LAYOUT = KVLayout(num_layers=1, kv_heads=1, head_dim=24, block_tokens=8, dtype="float32")  # 1536 bytes: 8 in 3 pages
MOST = 40


class TierModel(RuleBasedStateMachine):
    """`rows` is the oracle: the value of each row in use; a lowered size leaves those above it in use."""

    shared = False

    @initialize(slots=st.integers(1, MOST))
    def start(self, slots: int) -> None:
        size = TierSize("hbm", slots * LAYOUT.block_bytes, MOST * LAYOUT.block_bytes, PAGE)
        if self.shared:
            arena = Arena(MOST * LAYOUT.block_bytes, page_bytes=PAGE)
            self.memory: TierMemory = SharedTierMemory(Tier.HBM, LAYOUT, size, arena)
            assert self.memory.num_slots == 0
        else:
            self.memory = TierMemory(Tier.HBM, LAYOUT, size, PoolConfig(page_bytes=PAGE))
            assert self.memory.num_slots == slots
        self.view = self.memory.view()
        self.rows: dict[int, int] = {}

    @rule(slots=st.integers(1, MOST))
    def grow(self, slots: int) -> None:
        if self.shared:
            before = self.memory.num_slots
            self.memory.grow(MOST)
            assert self.memory.extend(slots) == (self.memory.num_slots > before)
            assert self.memory.num_slots >= min(MOST, before + slots)
        elif slots > self.memory.num_slots:
            self.memory.grow(slots)
            assert self.memory.num_slots == slots

    @rule(slots=st.integers(0, MOST))
    def shrink(self, slots: int) -> None:
        if slots <= self.memory.num_slots:
            occupied = sorted(slot for slot in self.rows if slot >= slots)
            self.memory.shrink(slots, np.array(occupied, np.uint32))
            assert self.memory.num_slots == slots

    @rule(slot=st.integers(0, MOST - 1), value=st.integers(1, 1000))
    def write(self, slot: int, value: int) -> None:
        if slot < self.memory.num_slots:
            self.view[slot] = value
            self.rows[slot] = value

    @rule(slot=st.integers(0, MOST - 1))
    def free(self, slot: int) -> None:
        self.rows.pop(slot, None)

    @invariant()
    def rows_hold(self) -> None:
        self.memory.check()
        for slot, value in self.rows.items():
            assert self.view[slot].min() == self.view[slot].max() == value

    @invariant()
    def memory_is_no_more_than_needed(self) -> None:
        nbytes = LAYOUT.block_bytes
        pages = set(range(-(-self.memory.num_slots * nbytes // PAGE)))
        for slot in self.rows:
            pages |= set(range(slot * nbytes // PAGE, -(-(slot + 1) * nbytes // PAGE)))
        assert self.memory.mapped_bytes >= len(pages) * PAGE
        freed = {slot for slot in range(MOST) if slot >= self.memory.num_slots} - set(self.rows)
        slack = sum(-(-(slot + 1) * nbytes // PAGE) - slot * nbytes // PAGE for slot in freed)
        assert self.memory.mapped_bytes <= (len(pages) + slack) * PAGE
        assert self.view[MOST - 1].shape == self.view.shape[1:]


class SharedTierModel(TierModel):
    shared = True


TestTierModel = TierModel.TestCase
TestSharedTierModel = SharedTierModel.TestCase
TestTierModel.settings = TestSharedTierModel.settings = settings(stateful_step_count=30)
