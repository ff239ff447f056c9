"""The pool under each eviction policy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from poolweave.errors import ConfigError, OutOfBlocks
from poolweave.index import EVICTION_POLICIES, RecomputeCost
from poolweave.mempool import Blocks, MemPool, PoolConfig
from poolweave.types import Tier

MakePool = Callable[..., MemPool]
Remember = Callable[..., Blocks]


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_what_is_pinned_or_active_is_no_victim(make_pool: MakePool, remember: Remember, policy: str) -> None:
    pool = make_pool(8, 4, eviction=policy)
    assert pool.stats().eviction == policy
    remember(pool, list(range(12)))
    for first in range(100, 180, 4):
        remember(pool, list(range(first, first + 4)))
        pool.match(list(range(first - 8, first - 4))).close()
        pool.check()
    kept = list(range(200, 212))
    remember(pool, kept)
    active = pool.alloc(2)
    with pool.match(kept, promote=True) as hit:
        assert hit.num_tokens == 12
        pool.free(pool.alloc(3))
        with pytest.raises(OutOfBlocks):
            pool.alloc(4)
        assert pool.tiers(hit.blocks).tolist() == [Tier.HBM.value] * 3
    pool.check()
    with pool.match(kept) as hit:
        assert hit.num_tokens == 12
    pool.free(active)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [("lru", [20, 30]), ("fifo", [20, 30]), ("lfu", [0, 30]), ("arc", [20, 30]), (RecomputeCost(), [0, 30])],
    ids=str,
)
def test_the_policy_decides_who_goes(
    make_pool: MakePool, remember: Remember, policy: str | RecomputeCost, kept: list[int]
) -> None:
    pool = make_pool(4, eviction=policy)
    prompts = {first: list(range(first, first + 4)) for first in (0, 10, 20, 30)}
    for prompt in prompts.values():
        remember(pool, prompt)
    for first in (0, 0, 20, 30):  # often; 10 never; lately
        pool.match(prompts[first]).close()
    pool.free(pool.alloc(2))
    found = []
    for first, prompt in prompts.items():
        with pool.match(prompt) as hit:
            found += [first] if hit.num_tokens else []
    assert found == kept


def test_a_policy_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'lfu'") as caught:
        PoolConfig(eviction="lfuu")
    assert caught.value.setting == "eviction"
