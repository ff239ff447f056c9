"""Watermarks: room is made ahead of need, off the caller's path; and promotion on a hit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from ref_waiting import until

from poolweave.errors import ConfigError
from poolweave.mempool import Blocks, MemPool, Watermarks
from poolweave.types import Tier

MakePool = Callable[..., MemPool]
Remember = Callable[..., Blocks]


def test_history_above_the_high_mark_is_demoted_to_the_low_one(make_pool: MakePool, remember: Remember) -> None:
    pool = make_pool(16, 16, watermarks=Watermarks(low=0.5, high=0.75))
    remember(pool, list(range(48)))
    assert pool.stats().tiers[Tier.HBM].historical == 12, "at the mark is not above it"
    blocks = remember(pool, list(range(100, 108)))
    until(lambda: pool.stats().events.get("swept", 0) == 6)
    stats = pool.stats()
    assert (stats.tiers[Tier.HBM].historical, stats.tiers[Tier.DRAM].historical) == (8, 6)
    assert stats.events["demoted"] == 6
    assert pool.tiers(blocks).tolist() == [1, 1], "the youngest stay"


def test_without_dram_history_is_evicted(make_pool: MakePool, remember: Remember) -> None:
    pool = make_pool(16, watermarks=Watermarks(low=0.25, high=0.5))
    active = pool.alloc(6)
    remember(pool, list(range(16)))
    until(lambda: pool.stats().events.get("swept", 0) == 4)
    assert pool.stats().tiers[Tier.HBM].active == len(active), "what is active stays, also above the mark"


def test_the_thread_ends_with_the_pool(make_pool: MakePool) -> None:
    pool = make_pool(4, watermarks=Watermarks(high=1.0))
    names = [thread.name for thread in threading.enumerate()]
    assert f"poolweave-sweep-{pool.instance}" in names
    pool.close()
    assert f"poolweave-sweep-{pool.instance}" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(("low", "high"), [(0.9, 0.8), (0.0, 0.5), (0.5, 1.5)])
def test_impossible_marks_are_refused(low: float, high: float) -> None:
    with pytest.raises(ConfigError, match="watermarks"):
        Watermarks(low=low, high=high)


def test_a_hit_is_promoted_where_there_is_room(make_pool: MakePool, remember: Remember, read: Any) -> None:
    pool = make_pool(4, 4)
    remember(pool, list(range(16)), 1)
    assert pool.swap_out(4) == 4
    with pool.match(list(range(16))) as hit:
        assert hit.tiers.tolist() == [2] * 4
    busy = pool.alloc(1)
    with pool.match(list(range(16)), promote=True) as hit:
        assert hit.tiers.tolist() == [2] * 4, "all or none"
    pool.free(busy)
    with pool.match(list(range(16)), promote=True) as hit:
        assert hit.tiers.tolist() == [1] * 4
        assert read(pool, hit.blocks) == [1, 2, 3, 4]
    assert pool.stats().events["promoted"] == 4
    assert pool.stats().tiers[Tier.HBM].pinned == 0
