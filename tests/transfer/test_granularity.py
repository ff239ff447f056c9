"""Costs fitted to what was measured, and the granularity that they lead to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolweave.transfer import CostMeter, KVLayout, LayerWork, TransferCosts, ends_after, layers_per_step

LAYOUT = KVLayout(num_layers=12, kv_heads=2, head_dim=8)


def work(*, layer_s: float, tell_s: float = 0.0, order: str = "aggregated", num_blocks: int = 8) -> LayerWork:
    layout = KVLayout(num_layers=12, kv_heads=2, head_dim=8, order=order)  # type: ignore[arg-type]
    return LayerWork(layout=layout, num_blocks=num_blocks, layer_s=layer_s, tell_s=tell_s)


def test_a_cheap_step_is_taken_by_layer_and_a_dear_one_by_request() -> None:
    costs = TransferCosts(per_step_s=1e-6, per_call_s=1e-7, per_byte_s=1e-9)
    layers = layers_per_step(work(layer_s=1e-3), costs)
    assert (12 % layers or layers) == 1, "the last step, which nothing hides, is the smallest"
    assert layers_per_step(work(layer_s=1e-3, tell_s=1e-1), costs) == 12
    dear = TransferCosts(per_step_s=1.0, per_call_s=1e-7, per_byte_s=1e-9)
    assert layers_per_step(work(layer_s=1e-3), dear) == 12


def test_between_the_two_a_few_layers_go_together() -> None:
    costs = TransferCosts(per_step_s=0, per_call_s=0, per_byte_s=1e-6)
    chosen = layers_per_step(work(layer_s=1e-2, tell_s=5e-3), costs)
    assert 1 < chosen < 12


def test_runs_follow_the_order() -> None:
    orders = {"aggregated": (1, 1), "layered": (2, 24), "token_major": (16, 1)}
    for order, runs in orders.items():
        layout = work(layer_s=0, order=order).layout
        assert (layout.runs(1), layout.runs(12)) == runs


@settings(max_examples=60, deadline=None)
@given(
    layer_s=st.floats(0, 1e-2), tell_s=st.floats(0, 1e-2), step=st.floats(0, 1e-2), call=st.floats(0, 1e-4),
    byte=st.floats(0, 1e-7), order=st.sampled_from(["aggregated", "layered"]),
)  # fmt: skip
def test_no_other_choice_ends_sooner(
    layer_s: float, tell_s: float, step: float, call: float, byte: float, order: str
) -> None:
    costs = TransferCosts(per_step_s=step, per_call_s=call, per_byte_s=byte)
    one = work(layer_s=layer_s, tell_s=tell_s, order=order)
    best = ends_after(one, costs, layers_per_step(one, costs))
    assert all(best <= ends_after(one, costs, layers) for layers in range(1, 13))
    by_request = 12 * layer_s + tell_s + costs.seconds(1, 8 * one.layout.runs(12), 8 * one.layout.block_bytes)
    assert ends_after(one, costs, 12) == pytest.approx(by_request)


def test_the_fit_finds_what_made_the_times() -> None:
    true = TransferCosts(per_step_s=3e-4, per_call_s=2e-6, per_byte_s=4e-10)
    meter, rng = CostMeter(), np.random.default_rng(0)
    assert meter.costs() == TransferCosts()
    for _ in range(200):
        steps, calls = int(rng.integers(1, 30)), int(rng.integers(1, 5000))
        nbytes = int(rng.integers(1, 1 << 28))
        seconds = true.seconds(steps, calls, nbytes) * rng.uniform(0.98, 1.02)
        meter.observe(steps=steps, calls=calls, nbytes=nbytes, seconds=seconds)
    found = meter.costs()
    for name in ("per_step_s", "per_call_s", "per_byte_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.2)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 99), st.integers(0, 9999), st.floats(1e-6, 1)), max_size=9))
def test_costs_are_never_negative(seen: list[tuple[int, int, int, float]]) -> None:
    meter = CostMeter()
    for steps, calls, nbytes, seconds in seen:
        meter.observe(steps=steps, calls=calls, nbytes=nbytes, seconds=seconds)
    costs = meter.costs()
    assert min(costs.per_step_s, costs.per_call_s, costs.per_byte_s) >= 0
    meter.observe(steps=0, calls=1, nbytes=1, seconds=1.0)  # nothing moved: says nothing
    assert meter.num_observed == len(seen)
