from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from poolweave.errors import ConfigError
from poolweave.scheduler.kv_events import TreeFeed
from poolweave.scheduler.prompt_tree import PromptTree


@dataclass
class Stored:
    block_hashes: list[object]
    token_ids: list[int]
    parent_block_hash: object | None = None
    block_size: int = 16


@dataclass
class Removed:
    block_hashes: list[object] = field(default_factory=list)


def tokens(blocks: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 32_000, 16 * blocks).tolist()


@pytest.fixture
def feed() -> TreeFeed:
    return TreeFeed(PromptTree(), "vllm-0")


def held(feed: TreeFeed, prompt: list[int]) -> int:
    return feed._tree.match(prompt).get("vllm-0", 0)


def test_stored_in_parts_and_removed_from_the_end(feed: TreeFeed) -> None:
    prompt = tokens(5)
    assert feed.stored(Stored([b"0", b"1"], prompt[:32])) == 2
    assert feed.stored(Stored([b"2", b"3", b"4"], prompt[32:], parent_block_hash=b"1")) == 3
    assert held(feed, prompt) == 80
    assert feed.removed(Removed([b"4", b"3"])) == 2
    assert held(feed, prompt) == 48
    assert feed.stored(Stored([b"3"], prompt[48:64], parent_block_hash=b"2")) == 1
    assert held(feed, prompt) == 64
    assert not feed.degraded


def test_one_of_two_copies_is_removed(feed: TreeFeed) -> None:
    prompt = tokens(2)
    feed.stored(Stored([1, 2], prompt))
    feed.stored(Stored([2], prompt[16:], parent_block_hash=1))  # computed twice: a second block with this hash
    assert feed.removed(Removed([2])) == 0
    assert held(feed, prompt) == 32
    assert feed.removed(Removed([2])) == 1
    assert held(feed, prompt) == 16
    assert feed.removed(Removed([2, 77])) == 0  # told too often, or never told


def test_missing_parent_degrades_until_all_is_told_again(feed: TreeFeed) -> None:
    prompt = tokens(4)
    assert feed.stored(Stored([3], prompt[48:], parent_block_hash=2)) == 0
    assert feed.degraded
    assert held(feed, prompt) == 0
    feed.cleared()
    assert not feed.degraded
    assert feed.stored(Stored([0, 1, 2, 3], prompt)) == 4
    assert held(feed, prompt) == 64
    feed.lost()
    assert feed.degraded


def test_tokens_that_do_not_fill_the_blocks_are_not_believed(feed: TreeFeed) -> None:
    assert feed.stored(Stored([0, 1], tokens(2)[:-1])) == 0
    assert feed.degraded
    assert len(feed) == 0


def test_larger_blocks_than_the_trees(feed: TreeFeed) -> None:
    prompt = tokens(6)
    assert feed.stored(Stored(["a", "b"], prompt[:64], block_size=32)) == 4
    assert feed.stored(Stored(["c"], prompt[64:], parent_block_hash="b", block_size=32)) == 2
    assert held(feed, prompt) == 96
    assert feed.removed(Removed(["b"])) == 4  # and what continues it
    assert held(feed, prompt) == 32
    for size in (0, 24):
        with pytest.raises(ConfigError, match="must divide"):
            feed.stored(Stored(["d"], prompt[:24], block_size=size))


def test_memory_is_bounded_and_the_rest_is_not_credited() -> None:
    feed = TreeFeed(PromptTree(), "vllm-0", max_blocks=3)
    prompt = tokens(5)
    assert feed.stored(Stored([0, 1, 2, 3, 4], prompt)) == 3
    assert (len(feed), feed.degraded, held(feed, prompt)) == (3, True, 48)


class Engine:
    """Holds blocks of three prompts, some twice, and tells about it over a stream that may lose events."""

    def __init__(self, feed: TreeFeed, lot: random.Random, loss: float) -> None:
        self.feed, self.lot, self.loss = feed, lot, loss
        self.prompts = [tokens(8, seed) for seed in range(3)]
        self.copies: dict[tuple[int, int], int] = {}

    def store(self, p: int, n: int) -> None:
        if n == 0 or self.copies.get((p, n - 1)):
            self.copies[p, n] = self.copies.get((p, n), 0) + 1
            if not self.lost():
                self.tell(p, n)

    def remove(self, p: int, n: int) -> None:
        if self.copies.get((p, n)):
            self.copies[p, n] -= 1
            if not self.lost():
                self.feed.removed(Removed([(p, n)]))

    def lost(self) -> bool:
        lost = self.lot.random() < self.loss
        if lost:
            self.feed.lost()
        return lost

    def tell(self, p: int, n: int) -> None:
        self.feed.stored(Stored([(p, n)], self.prompts[p][16 * n : 16 * n + 16], (p, n - 1) if n else None))

    def tell_all(self) -> None:
        """Only what can be reached: a block without its parent cannot be told, nor used."""
        self.feed.cleared()
        for p in range(3):
            for n in range(self.usable(p)):
                for _ in range(self.copies[p, n]):
                    self.tell(p, n)

    def usable(self, p: int) -> int:
        return next((n for n in range(8) if not self.copies.get((p, n))), 8)


@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_never_credited_with_more_than_it_holds(loss: float) -> None:
    lot = random.Random(4)
    feed = TreeFeed(PromptTree(), "vllm-0")
    engine = Engine(feed, lot, loss)
    full = 0
    for _ in range(2_000):
        (engine.store if lot.random() < 0.6 else engine.remove)(lot.randrange(3), lot.randrange(8))
        if feed.degraded and lot.random() < 0.2:
            engine.tell_all()
            assert not feed.degraded
        for p, prompt in enumerate(engine.prompts):
            credited = held(feed, prompt) // 16
            assert credited <= engine.usable(p) or feed.degraded
            full += credited == engine.usable(p) > 0
    assert full > 1_000  # and not by crediting nothing
