"""The page budget under random grants and releases, against a plain count of touched pages."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from poolweave.crosspool_engine.virtualizer import Grant, PageRun, Virtualizer
from poolweave.errors import ConfigError

PAGE = 1000
SIZES = {"small": 300, "even": 500, "large": 2_700}  # blocks that share, halve and span pages


class VirtualizerMachine(RuleBasedStateMachine):
    """The oracle is the set of mapped pages, moved only by the runs that come back."""

    @initialize(budget=st.integers(3, 40))
    def create(self, budget: int) -> None:
        self.virtualizer = Virtualizer(budget, PAGE)
        self.budget = budget
        for name, size in SIZES.items():
            self.virtualizer.add(name, block_bytes=size, max_blocks=30)
        self.mapped: set[tuple[str, int]] = set()
        self.held: list[Grant] = []

    def apply(self, runs: tuple[PageRun, ...], *, mapping: bool) -> None:
        for run in runs:
            for page in range(run.first, run.first + run.count):
                assert ((run.model, page) in self.mapped) != mapping, "mapped twice or unmapped twice"
                (self.mapped.add if mapping else self.mapped.remove)((run.model, page))

    def touched(self, model: str, blocks: tuple[int, ...]) -> set[tuple[str, int]]:
        size = SIZES[model]
        return {(model, byte // PAGE) for block in blocks for byte in range(block * size, (block + 1) * size)}

    @rule(model=st.sampled_from(sorted(SIZES)), count=st.integers(1, 12))
    def grant(self, model: str, count: int) -> None:
        in_use = {page for grant in self.held for page in self.touched(grant.model, grant.blocks)}
        got = self.virtualizer.grant(model, count)
        if got is None:
            busy = sum(len(grant.blocks) for grant in self.held if grant.model == model)
            pages = -(-count * SIZES[model] // PAGE) + count + 1  # no more than these, wherever the blocks lie
            assert busy + count > 30 or len(in_use) + pages > self.budget
            return
        assert len(got.blocks) == count
        self.apply(got.unmap, mapping=False)
        assert in_use <= self.mapped, "a page in use was taken"
        self.apply(got.map, mapping=True)
        for grant in self.held:
            assert grant.model != model or set(grant.blocks).isdisjoint(got.blocks)
        self.held.append(got)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        grant = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.apply(self.virtualizer.release(grant.model, grant.blocks), mapping=False)

    @invariant()
    def mapped_follows_what_is_in_use(self) -> None:
        self.virtualizer.check()
        in_use = {page for grant in self.held for page in self.touched(grant.model, grant.blocks)}
        assert in_use <= self.mapped
        assert len(self.mapped) <= min(self.budget, len(in_use) + len(SIZES))
        stats = self.virtualizer.stats()
        assert sum(stats.mapped_pages.values()) == len(self.mapped)
        assert sum(stats.used_pages.values()) == len(in_use)


VirtualizerMachine.TestCase.settings = settings(stateful_step_count=50)
TestVirtualizerMachine = VirtualizerMachine.TestCase


def test_lowest_blocks_first_and_runs_of_pages() -> None:
    virtualizer = Virtualizer(10, PAGE)
    virtualizer.add("m", block_bytes=500, max_blocks=100)
    first = virtualizer.grant("m", 6)
    second = virtualizer.grant("m", 4)
    assert first is not None
    assert second is not None
    assert first.map == (PageRun("m", 0, 3),)
    assert virtualizer.release("m", first.blocks) == (PageRun("m", 1, 2),)  # one idle page stays
    third = virtualizer.grant("m", 2)
    assert third is not None
    assert third.blocks == (0, 1)
    assert third.map == ()


def test_a_request_takes_another_models_idle_page_but_no_used_one() -> None:
    virtualizer = Virtualizer(2, PAGE)
    virtualizer.add("a", block_bytes=PAGE, max_blocks=5)
    virtualizer.add("b", block_bytes=PAGE, max_blocks=5)
    held = virtualizer.grant("a", 2)
    assert held is not None
    assert virtualizer.grant("b", 1) is None
    virtualizer.release("a", held.blocks)
    got = virtualizer.grant("b", 2)
    assert got is not None
    assert got.unmap == (PageRun("a", 0, 1),)
    assert virtualizer.can_ever("a", 2)
    assert not virtualizer.can_ever("a", 3)


def test_closing_a_range() -> None:
    virtualizer = Virtualizer(9, PAGE)
    virtualizer.add("m", block_bytes=PAGE, max_blocks=5)
    held = virtualizer.grant("m", 3)
    assert held is not None
    with pytest.raises(ConfigError, match="3 blocks of 'm' are in use"):
        virtualizer.remove("m")
    virtualizer.release("m", held.blocks)
    assert virtualizer.remove("m") == (PageRun("m", 0, 1),)
    assert virtualizer.num_mapped == 0


def test_misuse_is_refused() -> None:
    with pytest.raises(ConfigError, match="a budget has pages"):
        Virtualizer(0, PAGE)
    virtualizer = Virtualizer(9, PAGE)
    virtualizer.add("m", block_bytes=PAGE, max_blocks=5)
    with pytest.raises(ConfigError, match="here already"):
        virtualizer.add("m", block_bytes=PAGE, max_blocks=5)
    held = virtualizer.grant("m", 1)
    assert held is not None
    virtualizer.release("m", held.blocks)
    with pytest.raises(ConfigError, match="not all in use"):
        virtualizer.release("m", held.blocks)
