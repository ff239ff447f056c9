"""The eviction policies, each against its oracle: the same victims in the same order."""

from __future__ import annotations

import random
from itertools import count

import pytest
from ref_eviction import EvictionOracle

from poolweave.errors import ConfigError
from poolweave.index import EVICTION_POLICIES, RadixIndex, RecomputeCost

ORDERED = [name for name in EVICTION_POLICIES if name != "lru"]
COST = RecomputeCost(seconds_per_token=2.0, seconds_per_context_token=0.25)


def index_of(policy: str) -> RadixIndex:
    return RadixIndex(1, eviction=COST if policy == "cost-aware" else policy)


@pytest.mark.parametrize("policy", ORDERED)
@pytest.mark.parametrize("seed", range(4))
def test_victims_and_their_order_are_the_oracles(policy: str, seed: int) -> None:
    index, rng, payloads = index_of(policy), random.Random(seed), count(1)
    oracle = EvictionOracle(policy, COST.seconds_per_token, COST.seconds_per_context_token)
    prompts = [tuple(rng.choices(range(3), k=rng.randrange(1, 9))) for _ in range(60)]
    for step in range(500):
        prompt = rng.choice(prompts[: 10 + step // 8])
        priority = rng.choice((0, 0, 0, 0, 1))
        if rng.random() < 0.5:
            given = [next(payloads) for _ in prompt]
            index.insert(prompt, given, priority=priority)
            oracle.insert(prompt, given, priority)
        else:
            assert index.match(prompt).num_tokens == oracle.match(prompt)
        if len(index) > 40:
            wanted = rng.randrange(1, 12)
            assert index.evict(wanted).tolist() == oracle.evict(wanted), f"step {step}"
            index.check()
    assert index.evict(1000).tolist() == oracle.evict(1000)
    index.check()


@pytest.mark.parametrize("policy", ORDERED)
def test_the_coldest_are_those_that_would_be_evicted(policy: str) -> None:
    index, rng, payloads = index_of(policy), random.Random(5), count(1)
    for _ in range(80):
        prompt = rng.choices(range(3), k=rng.randrange(1, 9))
        index.insert(prompt, [next(payloads) for _ in prompt])
        index.match(rng.choices(range(3), k=4))
    for wanted in (1, 7, 30, len(index)):
        coldest = index.coldest(wanted)
        assert len(coldest) == wanted
        index.check()
        assert index.evict(wanted).tolist() == coldest.tolist()
        for _ in range(30):
            prompt = rng.choices(range(3), k=rng.randrange(1, 9))
            index.insert(prompt, [next(payloads) for _ in prompt])


@pytest.mark.parametrize("policy", ORDERED)
def test_a_pinned_prompt_is_passed_over_also_by_the_coldest(policy: str) -> None:
    index = index_of(policy)
    index.insert([1, 2, 3], [1, 2, 3])
    index.insert([1, 2, 4], [1, 2, 4])
    index.insert([5], [5])
    with index.match([1, 2, 3], pin=True):
        assert sorted(index.coldest(9).tolist()) == [4, 5]
        assert sorted(index.evict(9).tolist()) == [4, 5]
    assert index.evict(9).tolist() == [3, 2, 1]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [3, 4, 5, 1, 2, 6, 77, 76, 75, 74, 73, 72, 71, 70]),  # the run of seven was used last
        ("fifo", [1, 2, 3, 4, 5, 6, 77, 76, 75, 74, 73, 72, 71, 70]),  # uses do not count
        ("lfu", [3, 4, 5, 77, 76, 75, 74, 73, 72, 71, 70, 2, 6, 1]),  # once, twice, four times used
        ("s3fifo", [2, 3, 4, 5, 6, 77, 76, 75, 74, 73, 72, 71, 70, 1]),  # used again twice: it stays longest
        ("arc", [3, 4, 5, 77, 76, 75, 74, 73, 72, 71, 70, 1, 2, 6]),  # all used again outlive those used once
        ("cost-aware", [3, 4, 5, 77, 76, 75, 74, 73, 72, 71, 70, 2, 6, 1]),  # 2.0 a use; 3.75 at depth 8; 4.0; 8.0
    ],
)
def test_each_policy_prefers_what_its_name_says(policy: str, order: list[int]) -> None:
    index = index_of(policy)
    for token in range(1, 7):
        index.insert([token], [token])
    for token in (1, 1, 1, 2, 6):
        index.match([token])
    index.insert([7] * 8, range(70, 78))
    assert index.evict(20).tolist() == order


@pytest.mark.parametrize("policy", ORDERED)
def test_the_byte_cap_holds_under_every_policy(policy: str) -> None:
    index = RadixIndex(16, max_bytes="256KiB", eviction=policy)
    rng, payloads = random.Random(1), count(1)
    for _ in range(3000):
        prompt = [rng.randrange(50)] * 16 + rng.choices(range(9), k=16 * rng.randrange(4))
        index.insert(prompt, [next(payloads) for _ in range(len(prompt) // 16)])
        assert index.stats().nbytes <= 256 << 10
    index.check()
    assert len(index) > 500


def test_unknown_policies_and_impossible_costs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 's3fifo'") as caught:
        RadixIndex(eviction="s3-fifo")
    assert caught.value.setting == "eviction"
    for figures in ({"seconds_per_token": 0.0}, {"bytes_per_token": float("nan")}, {"seconds_per_context_token": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(figures))):
            RecomputeCost(**figures)
    assert RadixIndex().eviction == "lru"
    assert RadixIndex(eviction=RecomputeCost()).eviction == "cost-aware"
