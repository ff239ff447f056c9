"""Plans between any two ways to cut a model, against plain numpy slicing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from poolweave.errors import ConfigError, LayoutMismatch
from poolweave.transfer import KVLayout
from poolweave.transfer._native import Abort, Grid, Outcome, Tiers, copy_blocks
from poolweave.transfer.resharding import Cut, Shard, plan

NUM_SLOTS, BLOCKS = 4, 3
ORDERS = st.sampled_from(["aggregated", "layered", "token_major"])
ONE = np.zeros(BLOCKS, np.uint8)


class Rank:
    """The pool of one shard: a flat array, its view and its native grid."""

    def __init__(self, shard: Shard, slots: np.ndarray[Any, Any]) -> None:
        layout = shard.layout
        self.slots = slots.astype(np.int32)
        self.data = np.zeros(NUM_SLOTS * layout.block_bytes, np.uint8)
        self.view = layout.view(self.data, NUM_SLOTS)
        slot, plane, row = layout.strides(NUM_SLOTS)
        grid = Grid(
            base=self.data.ctypes.data, nbytes=self.data.nbytes, slot_stride=slot, plane_stride=plane, row_stride=row,
            row_bytes=layout.row_bytes, num_slots=NUM_SLOTS, num_planes=layout.num_planes, num_rows=layout.block_tokens,
        )  # fmt: skip
        self.tiers = Tiers([0], [grid])


def part_of(shard: Shard, whole: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """numpy's word on what a shard holds of `whole` [block, layer, part, token, head, dim]."""
    layers, heads = shard.layers, shard.heads
    return whole[:, layers.start : layers.stop, :, :, heads.start : heads.stop, :]


def check(source: Cut, target: Cut, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    layout = source.layout
    shape = (BLOCKS, layout.num_layers, len(layout.parts), layout.block_tokens, layout.kv_heads, layout.head_dim)
    whole = rng.integers(1, 200, shape).astype(layout.numpy_dtype)
    froms = {shard: Rank(shard, rng.permutation(NUM_SLOTS)[:BLOCKS]) for shard in source.shards}
    intos = {shard: Rank(shard, rng.permutation(NUM_SLOTS)[:BLOCKS]) for shard in target.shards}
    for shard, rank in froms.items():
        rank.view[rank.slots] = part_of(shard, whole)
    moved = dict.fromkeys(target.shards, 0)
    for route in plan(source, target):
        at_source, at_target = route.windows
        a, b = froms[route.source], intos[route.target]
        extents = a.tiers.extents(ONE, a.slots, [at_source]), b.tiers.extents(ONE, b.slots, [at_target])
        assert extents[0].block_bytes == extents[1].block_bytes == route.block_bytes
        word = np.array([1], np.uint64)
        assert copy_blocks(*extents, 0, BLOCKS, 1, word, 0, 1, Abort(), None) == Outcome.DONE
        moved[route.target] += route.block_bytes
    for shard, rank in intos.items():
        assert np.array_equal(rank.view[rank.slots], part_of(shard, whole))
        assert moved[shard] == shard.layout.block_bytes, "a byte came twice or never"


def fits(heads: int, tp: int) -> bool:
    return heads % tp == 0 or tp % heads == 0


@pytest.mark.parametrize("heads", range(1, 9))
@pytest.mark.parametrize("tp", [(1, 2), (2, 1), (2, 4), (4, 2), (4, 8), (8, 1), (8, 8), (1, 8)])
def test_heads_are_resharded_as_numpy_slices_them(heads: int, tp: tuple[int, int]) -> None:
    layout = KVLayout(num_layers=2, kv_heads=heads, head_dim=4, block_tokens=2)
    if not (fits(heads, tp[0]) and fits(heads, tp[1])):
        with pytest.raises(ConfigError):
            [Cut(layout=layout, tp=one) for one in tp]
        return
    check(Cut(layout=layout, tp=tp[0]), Cut(layout=layout, tp=tp[1]))


@given(
    heads=st.integers(1, 8), layers=st.integers(1, 7), dim=st.sampled_from([1, 3, 8]), orders=st.tuples(ORDERS, ORDERS),
    tps=st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 2), pps=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_cut_fits_any_cut(
    heads: int, layers: int, dim: int, orders: Any, tps: Any, pps: Any, dtype: str, seed: int
) -> None:
    assume(all(fits(heads, tp) for tp in tps) and max(pps) <= layers)
    cuts = [
        Cut(
            layout=KVLayout(num_layers=layers, kv_heads=heads, head_dim=dim, block_tokens=3, dtype=dtype, order=order),
            tp=tp,
            pp=pp,
        )
        for order, tp, pp in zip(orders, tps, pps, strict=True)
    ]
    check(cuts[0], cuts[1], seed)


@pytest.mark.parametrize(("tp", "pp"), [((1, 4), (1, 2)), ((4, 1), (3, 1)), ((2, 8), (2, 3))])
def test_latents_are_replicated(tp: tuple[int, int], pp: tuple[int, int]) -> None:
    layout = KVLayout.mla(num_layers=4, rank=6, rope=2, block_tokens=2)
    source, target = (Cut(layout=layout, tp=t, pp=p) for t, p in zip(tp, pp, strict=True))
    check(source, target)
    assert all(shard.layout.head_dim == 8 for shard in target.shards)


def test_equal_holders_share_the_load() -> None:
    layout = KVLayout(num_layers=1, kv_heads=1, head_dim=4, block_tokens=2)
    routes = plan(Cut(layout=layout, tp=4), Cut(layout=layout, tp=4))
    assert [route.source.rank for route in routes] == [0, 1, 2, 3]


def test_the_same_cut_moves_whole_blocks_in_one_run() -> None:
    cut = Cut(layout=KVLayout(num_layers=4, kv_heads=4, head_dim=8), tp=2, pp=2)
    for route in plan(cut, cut):
        assert (route.source, route.target.rank) == (route.target, route.source.rank)
        rank = Rank(route.source, np.arange(BLOCKS))
        assert rank.tiers.extents(ONE, rank.slots, [route.windows[0]]).num_runs == BLOCKS


def test_what_cannot_be_cut_is_refused_at_plan_time() -> None:
    layout = KVLayout(num_layers=2, kv_heads=6, head_dim=4)
    for bad in ({"tp": 4}, {"tp": 0}, {"pp": 3}, {"tp": 5}):
        with pytest.raises(ConfigError):
            Cut(layout=layout, **bad)
    other = KVLayout(num_layers=2, kv_heads=6, head_dim=4, dtype="float32")
    with pytest.raises(LayoutMismatch):
        plan(Cut(layout=layout), Cut(layout=other))
