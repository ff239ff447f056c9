"""Ranks of attention: what a single request can reach, and what does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from poolweave.crosspool_engine.planner.attention import AttentionLayout, AttentionNeed, lay_out_attention
from poolweave.errors import PlanInfeasible


def need(name: str, shards: int, own: int = 100, resident: int = 10, largest: int = 1) -> AttentionNeed:
    return AttentionNeed(
        name=name, kv_shards=shards, resident_bytes=resident, own_bytes=own, largest_request_bytes=largest
    )


def lay_out(*needs: AttentionNeed, ranks: int, capacity: int = 1000, total: int = 100) -> AttentionLayout:
    return lay_out_attention(needs, ranks=ranks, capacity_bytes=capacity, total_bytes=total)


def test_enough_heads_span_all_ranks_and_see_the_whole_pool() -> None:
    place = lay_out(need("gqa", 8), ranks=4).places[0]
    assert place.replicas == ((0, 1, 2, 3),)
    assert place.pool_share == 1.0


def test_latents_are_not_copied_and_get_no_replica_beyond_need() -> None:
    """The paper's Fig. 2: data-parallel attention on 4 ranks leaves a request a quarter of the pool."""
    got = lay_out(need("mla", 1), ranks=4)
    assert len(got.places[0].replicas) == 1
    assert got.places[0].pool_share == 0.25
    assert lay_out(need("mla", 1), ranks=1).places[0].pool_share == 1.0


def test_fewer_heads_than_ranks_take_groups_as_wide_as_they_fill() -> None:
    assert lay_out(need("gqa2", 2), ranks=4).places[0].replicas == ((0, 1),)
    assert lay_out(need("gqa3", 3), ranks=4).places[0].replicas == ((0,),)  # 3 heads split over neither 4 nor 2


def test_replicas_come_when_one_group_cannot_hold_the_demand() -> None:
    got = lay_out(need("mla", 1, resident=100), ranks=4, capacity=1000, total=1500)
    assert len(got.places[0].replicas) == 2
    assert got.kv_demand == (750, 750, 0, 0)
    assert got.kv_capacity == (900, 900, 1000, 1000)


def test_models_go_where_most_room_is_left() -> None:
    got = lay_out(need("a", 1), need("b", 1), ranks=2, total=1000)
    assert sorted(place.replicas for place in got.places) == [((0,),), ((1,),)]


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(PlanInfeasible, match="KV rank 0") as caught:
        lay_out(need("a", 1, resident=400), ranks=1, capacity=1000, total=601)
    assert (caught.value.part, caught.value.needed_bytes, caught.value.available_bytes) == ("kv", 601, 600)
    with pytest.raises(PlanInfeasible, match="largest request of a") as caught:
        lay_out(need("a", 1, largest=991), ranks=2)
    assert (caught.value.part, caught.value.needed_bytes, caught.value.available_bytes) == ("request", 991, 990)


def test_largest_request_counts_even_where_the_percentile_is_zero() -> None:
    got = lay_out(need("a", 2, own=0, largest=500), need("b", 1, own=0, largest=300), ranks=2, total=0)
    assert got.kv_demand[0] + got.kv_demand[1] >= 500
    assert max(got.kv_demand) >= 300


def test_embedding_and_head_weigh_on_a_replicas_first_rank() -> None:
    wide = AttentionNeed(
        name="a", kv_shards=2, resident_bytes=500, own_bytes=100, largest_request_bytes=0, ends_bytes=300
    )
    got = lay_out(wide, ranks=2, capacity=1000, total=100)
    assert got.places[0].replicas == ((0, 1),)
    assert got.kv_capacity == (600, 900)
    with pytest.raises(PlanInfeasible, match="its ranks reach 1,200"):  # the fuller one's room, twice
        lay_out(replace(wide, largest_request_bytes=1201), ranks=2, capacity=1000, total=100)
