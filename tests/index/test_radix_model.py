"""The radix index against its oracle: random operations, every answer and every invariant after each."""

from __future__ import annotations

from itertools import count

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from ref_radix import Prefix, PrefixOracle

from poolweave.index import Identity, Match, RadixIndex

BLOCK = 2
# Few token values and short blocks: prompts share, split and extend one another all the time.
prompts = st.lists(st.integers(0, 2), max_size=24).map(tuple)
namespaces = st.integers(0, 1)


class RadixModel(RuleBasedStateMachine):
    """Every payload is unique, so the oracle can tell which block the index gave up."""

    eviction = "lru"

    @initialize()
    def start(self) -> None:
        self.index = RadixIndex(BLOCK, eviction=self.eviction)
        assert self.index.namespace(Identity(model="m")) == 1  # 0 is nobody's
        self.oracle = PrefixOracle(BLOCK)
        self.payloads = count(1)
        self.held: list[tuple[Match, tuple[int, Prefix]]] = []

    @rule(tokens=prompts, ns=namespaces, priority=st.integers(0, 2))
    def insert(self, tokens: Prefix, ns: int, priority: int) -> None:
        given = [next(self.payloads) for _ in range(len(tokens) // BLOCK)]
        result = self.index.insert(tokens, given, ns, priority=priority)
        kept_out = self.oracle.insert(tokens, given, ns)
        assert result.num_tokens == len(given) * BLOCK
        assert result.duplicates.tolist() == result.surplus.tolist() == kept_out
        assert result.num_new == len(given) - len(kept_out)

    @rule(tokens=prompts, ns=namespaces, touch=st.booleans())
    def match(self, tokens: Prefix, ns: int, touch: bool) -> None:
        found = self.index.match(tokens, ns, touch=touch)
        assert found.blocks.tolist() == self.oracle.match(tokens, ns)
        assert found.num_tokens == len(found.blocks) * BLOCK

    @rule(tokens=prompts, ns=namespaces)
    def pin(self, tokens: Prefix, ns: int) -> None:
        found = self.index.match(tokens, ns, pin=True)
        assert found.blocks.tolist() == self.oracle.match(tokens, ns)
        assert found.pinned == bool(found.num_tokens)
        if found.pinned:
            self.held.append((found, (ns, tokens[: found.num_tokens])))
            self.oracle.pins.append(self.held[-1][1])

    @rule(which=st.integers(0, 100))
    def unpin(self, which: int) -> None:
        if self.held:
            found, key = self.held.pop(which % len(self.held))
            found.close()
            found.close()
            self.oracle.pins.remove(key)

    @rule(tokens=prompts, ns=namespaces)
    def delete(self, tokens: Prefix, ns: int) -> None:
        assert self.index.delete(tokens, ns).tolist() == self.oracle.delete(tokens, ns)

    @rule(num_blocks=st.integers(0, 12))
    def evict(self, num_blocks: int) -> None:
        gone = self.index.evict(num_blocks).tolist()
        for payload in gone:
            self.oracle.give_up(payload)
        assert len(gone) <= num_blocks
        if len(gone) < num_blocks:
            assert not any(map(self.oracle.may_go, self.oracle.stored)), "blocks that may go were left"

    @rule(ns=namespaces)
    def clear(self, ns: int) -> None:
        for payload in self.index.clear(ns).tolist():
            self.oracle.give_up(payload)
        pinned = {p for n, prefix in self.oracle.pins if n == ns for p in self.oracle.prefixes(prefix)}
        assert {prefix for n, prefix in self.oracle.stored if n == ns} == pinned

    @rule(num_blocks=st.integers(0, 30))
    def coldest(self, num_blocks: int) -> None:
        order = self.index.coldest(num_blocks).tolist()
        pinned = {(n, p) for n, prefix in self.oracle.pins for p in self.oracle.prefixes(prefix)}
        free = {v for k, v in self.oracle.stored.items() if k not in pinned}
        assert len(order) == min(num_blocks, len(free)) == len(set(order))
        assert set(order) <= free

    @invariant()
    def holds(self) -> None:
        self.index.check()
        assert len(self.index) == len(self.oracle.stored)
        pinned = {(n, p) for n, prefix in self.oracle.pins for p in self.oracle.prefixes(prefix)}
        assert self.index.stats().pinned_blocks == len(pinned)

    def teardown(self) -> None:
        for found, _ in self.held:
            found.close()
        assert np.sort(self.index.evict(10_000)).tolist() == sorted(self.oracle.stored.values())
        assert self.index.stats().num_nodes == self.index.stats().num_namespaces == 0


TestRadixModel = RadixModel.TestCase
TestRadixModel.settings = settings(stateful_step_count=40)


def model_of(policy: str) -> type:
    """The same under another policy: no descendant is orphaned, nothing pinned goes."""
    case = type(f"Radix_{policy}", (RadixModel,), {"eviction": policy}).TestCase
    case.settings = settings(max_examples=max(8, settings.default.max_examples // 4), stateful_step_count=30)
    return case


TestLfuModel = model_of("lfu")
TestFifoModel = model_of("fifo")
TestS3FifoModel = model_of("s3fifo")
TestArcModel = model_of("arc")
TestCostAwareModel = model_of("cost-aware")
