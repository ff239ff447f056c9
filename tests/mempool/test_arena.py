"""Arena and its ranges through Python; the native test goes deeper. Then a model of two ranges on one budget."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from poolweave.errors import ConfigError, OutOfPages
from poolweave.mempool import Arena

PAGE = 64 << 10


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_reserving_costs_address_space_only() -> None:
    arena = Arena("64GiB", page_bytes=2 << 20)
    before = resident_bytes()
    span = arena.reserve("64GiB", sole=True)
    assert resident_bytes() - before < 1 << 20
    assert span.buffer().shape == (64 << 30,)
    assert span.buffer()[-1] == 0
    assert span.buffer()[1 << 30] == 0
    assert arena.stats().resident_bytes == 0


def test_memory_is_back_after_shrinking() -> None:
    arena = Arena(256 * PAGE, page_bytes=PAGE)
    span = arena.reserve(256 * PAGE, sole=True)
    before = resident_bytes()
    span.map(0, 256)
    span.buffer()[:] = 1
    grown = resident_bytes() - before
    assert grown >= 256 * PAGE * 0.99
    span.unmap(64, 192)
    arena.set_budget(64 * PAGE)
    assert arena.stats().resident_bytes == 64 * PAGE
    assert resident_bytes() - before <= grown / 4 + 256 * PAGE * 0.01


def test_a_view_outlives_range_and_arena() -> None:
    view = Arena(PAGE, page_bytes=PAGE).reserve(PAGE, sole=True)
    view.map(0, 1)
    buffer = view.buffer()
    buffer[:] = 9
    del view
    assert buffer.sum() == 9 * PAGE


def test_a_sole_range_stays_a_handful_of_mappings() -> None:
    arena = Arena(4096 * PAGE, page_bytes=PAGE)
    span = arena.reserve(4096 * PAGE, sole=True)
    for first in range(0, 4096, 64):
        span.map(first, 64)
    with open("/proc/self/maps") as maps:
        begins = [int(line.split("-")[0], 16) for line in maps if "poolweave-arena" in line]
    mine = [address for address in begins if span.address <= address < span.address + 4096 * PAGE]
    assert mine == [span.address], "one mapping, however many calls backed it; other tests' arenas lie elsewhere"


def test_too_many_scattered_pages_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"vm\.max_map_count"):
        Arena("4GiB", page_bytes=4096).reserve("4GiB")


def test_the_budget_is_kept_and_named() -> None:
    arena = Arena(4 * PAGE, capacity=8 * PAGE, page_bytes=PAGE)
    span = arena.reserve(8 * PAGE)
    with pytest.raises(OutOfPages) as error:
        span.map(0, 5)
    assert (error.value.needed, error.value.free, error.value.budget) == (5, 4, 4)
    with pytest.raises(ConfigError):
        arena.set_budget(9 * PAGE)


def test_mapping_lets_other_threads_run() -> None:
    arena = Arena(512 * PAGE, page_bytes=PAGE)
    done: list[bool] = []

    def work() -> None:
        span = arena.reserve(128 * PAGE)
        for _ in range(50):
            span.map(0, 128)
            span.buffer()[: 128 * PAGE : PAGE] = 1
            span.unmap(0, 128)
        done.append(True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4
    arena.check()
    assert arena.stats().held_bytes == 0


class ArenaModel(RuleBasedStateMachine):
    """Two ranges, one budget; each mapped page holds a number of its own until it is unmapped."""

    @initialize(budget=st.integers(1, 12))
    def start(self, budget: int) -> None:
        self.arena = Arena(budget * PAGE, capacity=12 * PAGE, page_bytes=PAGE)
        self.budget = budget
        self.ranges = [self.arena.reserve(8 * PAGE), self.arena.reserve(8 * PAGE)]
        self.pages: list[dict[int, int]] = [{}, {}]
        self.next = 1

    @rule(which=st.integers(0, 1), first=st.integers(0, 8), count=st.integers(0, 4))
    def map(self, which: int, first: int, count: int) -> None:
        wanted = range(first, first + count)
        held = sum(map(len, self.pages))
        try:
            self.ranges[which].map(first, count)
        except ConfigError:
            assert first + count > 8 or set(wanted) & set(self.pages[which])
            return
        except OutOfPages:
            assert held + count > self.budget
            return
        assert held + count <= max(self.budget, held)
        for page in wanted:
            self.ranges[which].buffer()[page * PAGE : (page + 1) * PAGE] = self.next % 251
            self.pages[which][page] = self.next % 251
            self.next += 1

    @rule(which=st.integers(0, 1), first=st.integers(0, 8), count=st.integers(0, 4))
    def unmap(self, which: int, first: int, count: int) -> None:
        wanted = range(first, first + count)
        try:
            self.ranges[which].unmap(first, count)
        except ConfigError:
            assert first + count > 8 or set(wanted) - set(self.pages[which])
            return
        for page in wanted:
            del self.pages[which][page]

    @rule(budget=st.integers(1, 12))
    def set_budget(self, budget: int) -> None:
        self.arena.set_budget(budget * PAGE)
        self.budget = budget

    @rule()
    def trim(self) -> None:
        assert self.arena.trim() % PAGE == 0
        assert self.arena.stats().kept_bytes == 0

    @invariant()
    def pages_are_as_written(self) -> None:
        if not hasattr(self, "arena"):
            return
        self.arena.check()
        stats = self.arena.stats()
        assert stats.held_bytes == PAGE * sum(map(len, self.pages))
        assert stats.kept_bytes == 0 or stats.held_bytes + stats.kept_bytes <= self.budget * PAGE
        for span, pages in zip(self.ranges, self.pages, strict=True):
            span.check()
            seen = span.buffer().reshape(8, PAGE)
            expected = [pages.get(page, 0) for page in range(8)]
            assert seen.min(axis=1).tolist() == seen.max(axis=1).tolist() == expected
            assert np.count_nonzero([span.page_at(page) >= 0 for page in range(8)]) == len(pages)


ArenaModel.TestCase.settings = settings(stateful_step_count=25)
TestArenaModel = ArenaModel.TestCase
