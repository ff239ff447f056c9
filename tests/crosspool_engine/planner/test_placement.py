"""The integer program against an exhaustive search, and the rule that like layer times share a rank."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("scipy", reason="needs the plan extra")

from poolweave.crosspool_engine.planner.placement import Units, place_units
from poolweave.errors import PlanInfeasible


def loads(units: list[Units], counts: list[list[int]]) -> list[int]:
    return [sum(row[r] * u.nbytes for u, row in zip(units, counts, strict=True)) for r in range(len(counts[0]))]


def test_fullest_rank_is_the_least_possible() -> None:
    units = [Units("a", "moe", 3, 5), Units("b", "moe", 4, 3), Units("c", "dense", 1, 4)]
    counts = place_units(units, {"a": 1.0, "b": 1.0, "c": 1.0}, ranks=2, capacity_bytes=100)
    best = min(
        max(a * 5 + b * 3 + c * 4, (3 - a) * 5 + (4 - b) * 3 + (1 - c) * 4)
        for a, b, c in itertools.product(range(4), range(5), range(2))
    )
    assert max(loads(units, counts)) == best
    assert [sum(row) for row in counts] == [3, 4, 1]


def test_models_of_like_layer_time_share_a_rank() -> None:
    units = [Units(name, "moe", 4, 10) for name in ("slow", "fast", "slow2", "fast2")]
    times = {"slow": 10e-6, "slow2": 9e-6, "fast": 1e-6, "fast2": 1.1e-6}
    counts = place_units(units, times, ranks=2, capacity_bytes=200)
    held = [{u.model for u, row in zip(units, counts, strict=True) if row[rank]} for rank in range(2)]
    assert sorted(map(sorted, held)) == [["fast", "fast2"], ["slow", "slow2"]]


def test_memory_goes_before_like_layer_times() -> None:
    units = [Units("slow", "moe", 6, 10), Units("fast", "moe", 2, 10)]
    counts = place_units(units, {"slow": 10e-6, "fast": 1e-6}, ranks=2, capacity_bytes=40)
    assert loads(units, counts) == [40, 40]


def test_too_much_and_too_large_are_refused_with_the_bytes() -> None:
    with pytest.raises(PlanInfeasible, match="90 bytes") as caught:
        place_units([Units("a", "moe", 9, 10)], {"a": 1.0}, ranks=2, capacity_bytes=44)
    assert (caught.value.part, caught.value.needed_bytes, caught.value.available_bytes) == ("weights", 90, 88)
    with pytest.raises(PlanInfeasible, match="pieces of up to 50"):
        place_units([Units("a", "moe", 1, 50)], {"a": 1.0}, ranks=2, capacity_bytes=44)


def test_pieces_that_fit_by_sum_but_not_by_rank() -> None:
    with pytest.raises(PlanInfeasible):
        place_units([Units("a", "moe", 3, 30)], {"a": 1.0}, ranks=2, capacity_bytes=50)
