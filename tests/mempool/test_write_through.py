"""Write-through: second copies in DRAM, made off the callers' path, that cost nobody anything."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ref_waiting import until

from poolweave.errors import ConfigError, OutOfBlocks
from poolweave.mempool import Blocks, MemPool, Quota, Quotas, Watermarks
from poolweave.mempool import space as space_module
from poolweave.types import Tier

MakePool = Callable[..., MemPool]
Remember = Callable[..., Blocks]


def settled(pool: MemPool, sealed: int) -> None:
    """All of so many sealed blocks had their turn."""
    events = pool.stats
    until(lambda: events().events.get("written_through", 0) + events().events.get("not_written_through", 0) >= sealed)


def test_demoting_what_was_written_through_copies_nothing(
    make_pool: MakePool, remember: Remember, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(8, 16, write="through")
    remember(pool, list(range(24)), 10)
    settled(pool, 6)
    assert pool.stats().tiers[Tier.DRAM].mirrors == 6
    assert pool.stats().tiers[Tier.HBM].historical == 6  # they lie where they were
    pool.check()

    def no_copy(*_: object) -> None:
        raise AssertionError("a copy was made")

    monkeypatch.setattr(space_module, "swap_blocks", no_copy)
    assert pool.swap_out(4) == 4
    held = pool.alloc(8)  # demotes the rest
    events = pool.stats().events
    assert (events["demoted"], events["demoted_without_copy"]) == (6, 6)
    assert pool.stats().tiers[Tier.DRAM].mirrors == 0
    with pool.match(list(range(24))) as hit:
        assert hit.tiers.tolist() == [Tier.DRAM.value] * 6
        assert read(pool, hit.blocks) == [10, 11, 12, 13, 14, 15]
    pool.check()
    pool.free(held)


def test_a_mirror_goes_before_anybody_goes_without(make_pool: MakePool, remember: Remember) -> None:
    pool = make_pool(8, 8, write="through")
    remember(pool, list(range(16)))
    settled(pool, 4)
    held = pool.alloc(7, Tier.DRAM)
    assert pool.stats().tiers[Tier.DRAM].mirrors == 1
    assert pool.stats().events["mirrors_dropped"] == 3
    with pytest.raises(OutOfBlocks):
        pool.alloc(2, Tier.DRAM)
    assert pool.stats().tiers[Tier.DRAM].mirrors == 1  # not for what cannot be met
    with pool.match(list(range(16))) as hit:
        assert hit.num_tokens == 16
    pool.free(held)


def test_c10_without_room_below_nothing_counts_as_backed(make_pool: MakePool, remember: Remember, read: Any) -> None:
    pool = make_pool(8, 4, write="through")
    held = pool.alloc(3, Tier.DRAM)
    remember(pool, list(range(16)), 5)
    settled(pool, 4)
    stats = pool.stats()
    assert (stats.events["written_through"], stats.events["not_written_through"]) == (1, 3)
    assert stats.tiers[Tier.DRAM].mirrors == 1
    with pool.match(list(range(16))) as hit:
        assert read(pool, hit.blocks) == [5, 6, 7, 8]
    pool.free(held)


def test_a_copy_that_fails_leaves_no_mirror(
    make_pool: MakePool, remember: Remember, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(8, 8, write="through")
    copy = space_module.swap_blocks
    failed: list[int] = []

    def failing(*arguments: Any) -> None:
        if not failed:
            failed.append(1)
            raise OSError("the copy failed")
        copy(*arguments)

    monkeypatch.setattr(space_module, "swap_blocks", failing)
    remember(pool, list(range(16)), 5)
    until(lambda: bool(failed))
    remember(pool, list(range(100, 104)), 9)
    settled(pool, 1)
    pool.check()
    assert pool.stats().tiers[Tier.DRAM].mirrors == 1
    assert pool.swap_out(8) == 5  # the others are written back
    with pool.match(list(range(16))) as hit:
        assert read(pool, hit.blocks) == [5, 6, 7, 8]


def test_shrinking_dram_drops_mirrors_first(make_pool: MakePool, remember: Remember) -> None:
    pool = make_pool(8, 8, write="through")
    remember(pool, list(range(24)))
    settled(pool, 6)
    pool.resize(dram=2 * pool.layout.block_bytes)
    tier = pool.stats().tiers[Tier.DRAM]
    assert (tier.total, tier.mirrors, tier.overhang) == (2, 2, 0)
    pool.check()
    pool.resize(hbm=3 * pool.layout.block_bytes)  # the blocks move down in HBM or are demoted
    pool.check()


def test_a_quota_of_dram_holds_for_mirrors(make_pool: MakePool, remember: Remember) -> None:
    pool = make_pool(8, 8, write="through", quotas=Quotas(each=Quota(dram=2 * 512)))
    blocks = pool.alloc(4, ns=0)
    pool.seal(blocks)
    settled(pool, 4)
    assert pool.stats().tenants[0].used == (4, 2)
    assert pool.stats().tiers[Tier.DRAM].mirrors == 2
    held = pool.alloc(2, Tier.DRAM, ns=0)  # its own mirrors go
    assert pool.stats().tiers[Tier.DRAM].mirrors == 0
    pool.free(blocks + held)


def test_random_use_keeps_bytes_and_books(make_pool: MakePool, read: Any) -> None:
    pool = make_pool(24, 32, write="through", watermarks=Watermarks(low=0.7, high=0.9))
    rng = random.Random(3)
    for step in range(1500):
        prompt = rng.randrange(20)
        tokens = [prompt] * 4 * rng.randrange(1, 6)
        with pool.match(tokens, promote=rng.random() < 0.5) as hit:
            assert read(pool, hit.blocks) == [prompt] * len(hit.blocks)
        blocks = pool.alloc(len(tokens) // 4)
        pool.view()[pool.slots(blocks)] = np.float32(prompt)
        pool.seal(blocks)
        pool.insert(tokens, blocks)
        pool.free(blocks)
        if step % 100 == 0:
            pool.swap_out(4)
            pool.resize(dram=rng.randrange(8, 40) * 512)
    assert pool.stats().events["demoted_without_copy"] > 0


def test_write_through_needs_a_lower_tier_and_a_known_word(make_pool: MakePool) -> None:
    with pytest.raises(ConfigError, match="dram"):
        make_pool(8, write="through")
    with pytest.raises(ConfigError, match="none of back, through"):
        make_pool(8, 8, write="around")
