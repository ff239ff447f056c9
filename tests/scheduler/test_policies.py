from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from poolweave.scheduler._native import CandidateTable
from poolweave.scheduler.policies import (
    POLICIES,
    Candidates,
    LeastLoad,
    PowerOfTwo,
    PromptTreePolicy,
    RoundRobin,
    SessionId,
    draw_lowest,
)
from poolweave.scheduler.slots import Slots


def candidates(
    queued: list[float],
    own: list[float],
    session: str | None = None,
    slots: list[int] | None = None,
    *,
    cached: int = 100,
) -> Candidates:
    names = Slots()
    for i in range(10):
        names.add(f"i{i}")
    at = list(range(len(queued))) if slots is None else slots
    return Candidates(
        slots=np.array(at),
        names=names,
        table=CandidateTable.of(
            np.array(at), np.full(len(at), cached, np.int32), np.array(queued), np.array(own), uncached_s=2.0
        ),
        num_tokens=100,
        session=session,
    )


def test_prompt_tree_takes_the_least_sum() -> None:
    policy = PromptTreePolicy(random.Random(0))
    assert policy.choose(candidates([3.0, 1.0, 0.0], [0.5, 1.0, 2.1])) == 2 - 1
    assert policy.choose(candidates([3.0, 1.0, 0.0], [0.5, 1.0, 1.9])) == 2


def test_prompt_that_nobody_holds_enough_of_goes_by_load() -> None:
    policy = PromptTreePolicy(random.Random(0), min_match=0.2)
    assert policy.choose(candidates([0.1, 0.0], [0.5, 1.0], cached=20)) == 0
    assert policy.choose(candidates([0.1, 0.0], [0.5, 1.0], cached=19)) == 1


def test_least_load_does_not_look_at_matches() -> None:
    assert LeastLoad(random.Random(0)).choose(candidates([1.0, 0.9], [0.0, 9.0])) == 1


def test_ties_are_drawn_by_lot() -> None:
    drawn = Counter(draw_lowest(np.array([0.3, 0.1 + 0.2, 0.5, 0.3]), random.Random(seed)) for seed in range(300))
    assert set(drawn) == {0, 1, 3}
    assert min(drawn.values()) > 70
    assert draw_lowest(np.zeros(1), random.Random(0)) == 0
    assert draw_lowest(np.array([np.inf, 1.0]), random.Random(0)) == 1


def test_round_robin_goes_on_where_instances_come_and_go() -> None:
    policy = RoundRobin(random.Random(0))

    def turn(slots: list[int]) -> int:
        return slots[policy.choose(candidates([0.0] * len(slots), [0.0] * len(slots), slots=slots))]

    assert [turn([0, 1, 2]) for _ in range(4)] == [0, 1, 2, 0]
    assert turn([0, 2]) == 2  # 1 has gone
    assert turn([0, 1, 2, 3]) == 3
    assert turn([0, 1]) == 0


def test_session_stays_and_a_death_moves_only_its_sessions() -> None:
    policy = SessionId(random.Random(0))
    every, fewer = list(range(8)), [0, 1, 2, 4, 5, 6, 7]

    def at(session: str, slots: list[int]) -> int:
        return slots[policy.choose(candidates([0.0] * len(slots), [0.0] * len(slots), session, slots))]

    before = {f"s{i}": at(f"s{i}", every) for i in range(400)}
    assert min(Counter(before.values()).values()) > 25
    for session, slot in before.items():
        assert at(session, every) == slot
        if slot != 3:
            assert at(session, fewer) == slot
    moved = {at(session, fewer) for session, slot in before.items() if slot == 3}
    assert len(moved) > 3
    assert policy.choose(candidates([2.0, 1.0], [0.0, 0.0])) == 1  # no session: by load


def test_power_of_two_avoids_the_longest_queue_and_spreads() -> None:
    policy = PowerOfTwo(random.Random(0))
    chosen = Counter(policy.choose(candidates([5.0, 1.0, 2.0, 1.5], [0.0] * 4)) for _ in range(600))
    assert chosen[0] == 0
    assert chosen[1] > chosen[3] > chosen[2] > 50
    assert policy.choose(candidates([5.0], [0.0])) == 0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_chooses_among_few_and_many(name: str) -> None:
    policy = POLICIES[name](random.Random(0))
    for size in (1, 2, 9):
        for session in (None, "s"):
            assert 0 <= policy.choose(candidates([1.0] * size, [1.0] * size, session)) < size


def test_no_cost_to_choose_from() -> None:
    with pytest.raises(ValueError, match="no cost"):
        draw_lowest(np.zeros(0), random.Random(0))
    assert draw_lowest(np.array([np.nan, np.nan]), random.Random(0)) == 0
