"""The native tree against a flat dictionary, and its memory under a cap."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from ref_prompt_tree import ReferencePromptTree

from poolweave.errors import ConfigError
from poolweave.scheduler._native import NativePromptTree, block_keys, tokens_of_list

SLOTS = 4
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


def keys_of(prompt: tuple[int, ...]) -> np.ndarray:
    """One key a prefix: prompts that share it share the key."""
    return block_keys(np.array(prompt, np.int32), 1, 7)


class Tree(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = NativePromptTree(None)
        self.model = ReferencePromptTree()
        self.told = 0

    @rule(prompt=PROMPTS, slot=st.integers(0, SLOTS - 1), ttl=st.sampled_from([1.0, 2.0, 5.0, float("inf")]))
    def insert(self, prompt: tuple[int, ...], slot: int, ttl: float) -> None:
        expiry = self.model.now + ttl
        assert self.tree.insert(keys_of(prompt), slot, expiry, self.model.now) == len(prompt)
        self.model.insert(prompt, slot, expiry)

    @rule(prompt=PROMPTS, slot=st.integers(0, SLOTS - 1), ttl=st.sampled_from([1.0, 3.0]), cut=st.integers(0, 7))
    def insert_below(self, prompt: tuple[int, ...], slot: int, ttl: float, cut: int) -> None:
        cut = min(cut, len(prompt) - 1)
        keys, expiry = keys_of(prompt), self.model.now + ttl
        parent = int(keys[cut - 1]) if cut else None
        done = self.tree.insert(keys[cut:], slot, expiry, self.model.now, parent)
        if cut and not self.model.alive(slot, prompt[:cut]):
            self.told += 1
            assert done == 0
            assert self.tree.stats().orphans == self.told
        else:
            assert done == len(prompt) - cut
            self.model.insert(prompt, slot, expiry)

    @rule(prompt=PROMPTS, slot=st.integers(0, SLOTS - 1))
    def remove(self, prompt: tuple[int, ...], slot: int) -> None:
        expected = self.model.remove(prompt, slot)
        assert self.tree.remove(keys_of(prompt)[-1:], slot, self.model.now) == expected

    @rule(slot=st.integers(0, SLOTS - 1), blocks=st.sampled_from([0, 3, 8, 20, 2**32 - 1]))
    def limit(self, slot: int, blocks: int) -> None:
        # Raising a limit would bring entries back that a sweep may or may not have freed already.
        blocks = min(blocks, self.model.capacity.get(slot, 2**32 - 1))
        self.tree.limit(slot, blocks)
        self.model.capacity[slot] = blocks

    @rule(slot=st.integers(0, SLOTS - 1))
    def retire(self, slot: int) -> None:
        self.tree.retire(slot)
        self.model.retire(slot)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.model.now += seconds

    @rule(nodes=st.integers(0, 40))
    def sweep(self, nodes: int) -> None:
        self.tree.sweep(self.model.now, nodes)

    @rule(prompt=PROMPTS)
    def match(self, prompt: tuple[int, ...]) -> None:
        scores = np.full(SLOTS, -1, np.int32)
        longest = self.tree.match(keys_of(prompt), self.model.now, scores)
        assert scores.tolist() == self.model.match(prompt, SLOTS)
        assert longest == max(scores)

    @invariant()
    def holds(self) -> None:
        self.tree.check()

    def teardown(self) -> None:
        self.tree.sweep(self.model.now, self.tree.stats().nodes + 1)
        for _ in range(3):  # a freed subtree may lie behind the cursor
            self.tree.sweep(self.model.now, 10_000)
        self.tree.check()
        living = {prefix for slot, prefix in self.model.entries if self.model.alive(slot, prefix)}
        stats = self.tree.stats()
        assert stats.blocks == len(living)
        assert [self.tree.entries(slot) for slot in range(SLOTS)] == [self.model.living(s) for s in range(SLOTS)]


TestTree = Tree.TestCase
TestTree.settings = settings(stateful_step_count=40)


@pytest.mark.parametrize("others", range(8, 24))
def test_what_a_shorter_hold_took_the_place_of_leaves_memory(others: int) -> None:
    """An instance comes back and holds less of a run than in its last life, before a sweep has seen that."""
    tree = NativePromptTree(None)
    tree.insert(keys_of((2, 0, 1)), 0, 9.0, 0.0)
    for token in range(others):  # the sweep is elsewhere then
        tree.insert(keys_of((10 + token,)), 1, 9.0, 0.0)
    tree.retire(0)
    tree.insert(keys_of((2,)), 0, 9.0, 0.0)
    tree.sweep(0.0, 100)
    assert (tree.stats().blocks, tree.entries(0)) == (1 + others, 1)
    tree.check()


def test_cap_holds_at_every_step_and_what_stays_is_right() -> None:
    cap = 200_000
    tree = NativePromptTree(cap)
    rng = np.random.default_rng(3)
    prompts = [block_keys(rng.integers(0, 9, n).astype(np.int32), 1, i % 5) for i, n in enumerate([3, 50, 900] * 700)]
    for step, keys in enumerate(prompts):
        held = tree.insert(keys, step % 7, 1e9, 0.0)
        assert tree.stats().nbytes <= cap
        scores = np.zeros(7, np.int32)
        tree.match(keys, 0.0, scores)
        assert scores[step % 7] == held == len(keys)
        if step % 100 == 0:
            tree.check()
    assert tree.stats().evicted > 100_000
    assert tree.stats().nbytes > cap / 2


def test_capacity_forgets_what_was_used_longest_ago() -> None:
    tree = NativePromptTree(None)
    tree.limit(0, 30)
    prompts = [block_keys(np.arange(10, dtype=np.int32) + 100 * i, 1, 0) for i in range(6)]
    scores = np.zeros(1, np.int32)

    def held(i: int) -> int:
        return tree.match(prompts[i], 0.0, scores)

    for i in range(3):
        tree.insert(prompts[i], 0, 1e9, 0.0)
    assert [held(i) for i in range(3)] == [10, 10, 10]
    for _ in range(20):
        tree.insert(prompts[0], 0, 1e9, 0.0)  # used again: takes nothing in
    tree.insert(prompts[3], 0, 1e9, 0.0)
    assert [held(i) for i in range(4)] == [10, 10, 10, 10]  # it cannot tell yet that 0 kept its place
    tree.insert(prompts[4], 0, 1e9, 0.0)
    assert [held(i) for i in range(5)] == [10, 0, 10, 10, 10]
    tree.insert(prompts[5], 0, 1e9, 0.0)
    assert [held(i) for i in range(6)] == [10, 0, 0, 10, 10, 10]
    tree.limit(0, 0)
    assert [held(i) for i in range(6)] == [0] * 6


def test_prompt_larger_than_the_cap_is_held_as_far_as_it_fits() -> None:
    tree = NativePromptTree(65_536)
    keys = block_keys(np.arange(50_000, dtype=np.int32), 1, 0)
    held = tree.insert(keys, 0, 1e9, 0.0)
    assert 1_000 < held < 50_000
    tree.check()
    scores = np.zeros(1, np.int32)
    assert tree.match(keys, 0.0, scores) == scores[0] == held
    assert tree.insert(keys[held:], 0, 1e9, 0.0, int(keys[held - 1])) == 0
    tree.check()


def test_chain_of_branches_needs_no_recursion() -> None:
    tree = NativePromptTree(None)
    depth = 40_000
    spine = block_keys(np.arange(depth, dtype=np.int32), 1, 0)
    tree.insert(spine, 0, 1e9, 0.0)
    for i in reversed(range(depth)):  # a branch behind every block: one node each
        tree.insert(np.array([i + 1], np.uint64), 0, 1e9, 0.0, int(spine[i]))
    assert tree.stats().nodes == 2 * depth - 1  # the last block's leaf grew in place
    tree.check()
    assert tree.remove(spine[:1], 0, 0.0) == 2 * depth
    assert tree.stats().nodes == 0
    tree.check()


def test_generation_that_wraps_does_not_raise_the_dead() -> None:
    tree = NativePromptTree(None)
    keys = block_keys(np.arange(4, dtype=np.int32), 1, 0)
    tree.insert(keys, 1, 1e9, 0.0)
    for _ in range(65_536):
        tree.retire(1)
    scores = np.zeros(2, np.int32)
    assert tree.match(keys, 0.0, scores) == 0
    tree.check()


def test_time_never_runs_backwards() -> None:
    tree = NativePromptTree(None)
    keys = block_keys(np.arange(4, dtype=np.int32), 1, 0)
    tree.insert(keys, 0, 10.0, 0.0)
    scores = np.zeros(1, np.int32)
    assert tree.match(keys, 9.0, scores) == 4
    assert tree.match(keys, 10.0, scores) == 0
    assert tree.match(keys, 1.0, scores) == 0
    assert tree.insert(keys, 0, 5.0, 1.0) == 0  # already over


def test_keys_chain_over_blocks_and_namespaces() -> None:
    tokens = np.arange(40, dtype=np.int32)
    keys = block_keys(tokens, 16, 0)
    assert len(keys) == 2
    assert block_keys(tokens[:15], 16, 0).size == 0
    other = tokens.copy()
    other[0] = 99
    assert not set(keys.tolist()) & set(block_keys(other, 16, 0).tolist())
    assert not set(keys.tolist()) & set(block_keys(tokens, 16, 1).tolist())


@pytest.mark.parametrize("block_tokens", [1, 4, 16, 32, 64, 100])
def test_keys_are_xxh3_seeded_with_the_key_before(block_tokens: int) -> None:
    tokens = np.random.default_rng(1).integers(0, 2**31, 3 * block_tokens + block_tokens // 2, dtype=np.int32)
    key, expected = 12345, []
    for start in range(0, 3 * block_tokens, block_tokens):
        block = tokens[start : start + block_tokens].astype("<i4").tobytes()
        key = xxhash.xxh3_64_intdigest(block, seed=key)
        expected.append(key)
    assert block_keys(tokens, block_tokens, 12345).tolist() == expected


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="block_tokens"):
        block_keys(np.zeros(4, np.int32), 0, 0)
    with pytest.raises(ConfigError, match="65536 instances"):
        NativePromptTree(None).retire(65_536)
    with pytest.raises(ValueError, match="must not be negative"):
        block_keys(np.array([1, -2], np.int32), 16, 0)
    for wrong in ([1, 2.5], [True], [-1], [2**31], ["a"], [np.int64(3)]):
        assert tokens_of_list(wrong) is None
    assert tokens_of_list([0, 2**31 - 1]).tolist() == [0, 2**31 - 1]
