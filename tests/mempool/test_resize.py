"""Elastic tiers: C8 and C9, memory returned as blocks go, live blocks never taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from poolweave.errors import ConfigError, OutOfBlocks
from poolweave.mempool import Blocks, MemPool
from poolweave.transfer import KVLayout
from poolweave.types import Tier

MakePool = Callable[..., MemPool]
PAGE = 64 << 10  # 128 blocks of 512 bytes


def test_c8_shrink_and_regrow(make_pool: MakePool) -> None:
    pool = make_pool(1536)
    size = pool.layout.block_bytes
    for hbm in (240, 1536, 240, 1536):
        pool.resize(hbm=hbm * size)
        tier = pool.stats().tiers[Tier.HBM]
        assert (tier.total, tier.free) == (hbm, hbm)
        assert tier.memory.held_bytes == -(-hbm * size // PAGE) * PAGE
        blocks = pool.alloc(hbm)
        pool.view()[pool.slots(blocks)] = 1
        with pytest.raises(OutOfBlocks):
            pool.alloc(1)
        pool.free(blocks)
        pool.check()


def test_c8_shrinking_below_use_takes_no_live_block(
    make_pool: MakePool, fill: Callable[..., None], read: Callable[..., Any]
) -> None:
    pool = make_pool(1536)
    size = pool.layout.block_bytes
    blocks = pool.alloc(1536)
    fill(pool, blocks[1400:], 1)
    pool.resize(hbm=240 * size)
    assert pool.stats().tiers[Tier.HBM].overhang == 1296
    assert read(pool, blocks[1400:]) == list(range(1, 137))
    with pytest.raises(OutOfBlocks):
        pool.alloc(1)
    pool.free(blocks[:1400])
    tier = pool.stats().tiers[Tier.HBM]
    assert (tier.active, tier.free, tier.overhang) == (136, 104, 136)
    assert tier.memory.resident_bytes <= 2 * PAGE + 2 * PAGE, "what lies empty between is given back at once"
    assert read(pool, blocks[1400:]) == list(range(1, 137))
    pool.free(blocks[1400:])
    tier = pool.stats().tiers[Tier.HBM]
    assert (tier.free, tier.overhang, tier.memory.held_bytes) == (240, 0, 2 * PAGE)
    pool.resize(hbm=1536 * size)
    assert len(pool.alloc(1536)) == 1536


def test_shrinking_moves_history_down_and_evicts_the_rest(
    make_pool: MakePool, remember: Callable[..., Blocks], read: Callable[..., Any]
) -> None:
    pool = make_pool(16)
    size = pool.layout.block_bytes
    low = pool.alloc(10)
    old = remember(pool, [1] * 12, 1)
    young = remember(pool, [2] * 12, 11)
    pool.free(low[:2])
    pool.resize(hbm=12 * size)
    assert pool.match([1] * 12).num_tokens == 4  # 8 live and 4 of history fit
    with pool.match([2] * 12) as hit:
        assert hit.blocks == young
        assert read(pool, young) == [11, 12, 13]
        assert max(pool.slots(young)) < 12
    assert pool.stats().events["evicted"] == 2
    assert len(old) == 3


def test_resizing_both_tiers_changes_both_or_none(make_pool: MakePool) -> None:
    pool = make_pool(8, 8)
    size = pool.layout.block_bytes
    for sizes in ({"hbm": 4 * size, "dram": "1TiB"}, {"hbm": "1TiB", "dram": 4 * size}):
        with pytest.raises(ConfigError):
            pool.resize(**sizes)
        assert [pool.stats().tiers[tier].total for tier in (Tier.HBM, Tier.DRAM)] == [8, 8]
    pool.resize(hbm=4 * size, dram=6 * size)
    assert [pool.stats().tiers[tier].total for tier in (Tier.HBM, Tier.DRAM)] == [4, 6]


def test_shrinking_hbm_demotes_first(make_pool: MakePool, remember: Callable[..., Blocks]) -> None:
    pool = make_pool(8, 8)
    blocks = remember(pool, list(range(32)))
    pool.resize(hbm=2 * pool.layout.block_bytes)
    with pool.match(list(range(32))) as hit:
        assert hit.num_tokens == 32
    assert pool.tiers(blocks).tolist().count(2) == 6
    assert "evicted" not in pool.stats().events


def test_a_place_on_loan_is_not_returned(make_pool: MakePool) -> None:
    pool = make_pool(256)
    blocks = pool.alloc(256)
    pool.view()[pool.slots(blocks)] = 4
    pool.seal(blocks)
    store = pool._links._store
    loan = store.lend(blocks.array[250:])
    pool.free(blocks)
    pool.resize(hbm=pool.layout.block_bytes)
    assert pool.view()[loan.slots].min() == 4
    store.give_back(loan)
    assert pool.view()[loan.slots].max() == 0
    assert pool.stats().tiers[Tier.HBM].memory.held_bytes == PAGE


def test_c9_caps_hold_at_every_step(make_pool: MakePool, remember: Callable[..., Blocks]) -> None:
    pool = make_pool(128, 256)
    for seed in range(40):
        remember(pool, [seed] * 4 * 24)
        stats = pool.stats()
        assert stats.tiers[Tier.HBM].memory.resident_bytes <= PAGE
        assert stats.tiers[Tier.DRAM].memory.resident_bytes <= 2 * PAGE
        assert all(t.active + t.historical <= t.total for t in stats.tiers.values())


def test_growing_beyond_the_maximum_is_refused(make_pool: MakePool) -> None:
    pool = make_pool(4, max_hbm=8 * 512)
    pool.resize(hbm=8 * 512)
    with pytest.raises(ConfigError, match="max_hbm"):
        pool.resize(hbm=9 * 512)
    with pytest.raises(ConfigError, match="hbm"):
        pool.resize(hbm=100)
    assert pool.stats().tiers[Tier.HBM].total == 8


def test_a_layered_tier_is_static() -> None:
    layout = KVLayout(num_layers=2, kv_heads=1, head_dim=8, block_tokens=4, dtype="float32", order="layered")
    with MemPool(layout, hbm=4 * layout.block_bytes) as pool:
        pool.resize(hbm=4 * layout.block_bytes)
        with pytest.raises(ConfigError, match="aggregated"):
            pool.resize(hbm=8 * layout.block_bytes)


def test_views_taken_before_growing_stay_right(make_pool: MakePool) -> None:
    pool = make_pool(2)
    view = pool.view()
    pool.resize(hbm=1000 * pool.layout.block_bytes)
    blocks = pool.alloc(1000)
    view[pool.slots(blocks)] = 6
    assert pool.view()[999].min() == 6
