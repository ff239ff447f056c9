from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poolweave.errors import ConfigError
from poolweave.scheduler.cost_model import (
    ArchitectureModel,
    CostModel,
    DecodeStep,
    KVLink,
    Link,
    MoveOrRecompute,
    PrefillSample,
    StepSample,
)

MODEL = ArchitectureModel(
    constant_s=5e-3, linear_s=1e-4, quadratic_s=2e-9, quadratic_cached_s=-1e-9, decode=DecodeStep(constant_s=1e-2)
)
KV_BYTES = 819_200  # Llama-2-13B, 16 bit, a token


def test_fit_finds_the_constants_it_was_made_of() -> None:
    samples = [
        PrefillSample(prompt_tokens=x, cached_tokens=c, seconds=MODEL.prefill_s(x, c))
        for x in (100, 900, 4000, 16000)
        for c in (0, x // 4, x // 2)
    ]
    fitted = ArchitectureModel.fit(samples)
    assert fitted.constant_s == pytest.approx(5e-3)
    assert fitted.linear_s == pytest.approx(1e-4)
    assert fitted.quadratic_s == pytest.approx(2e-9)
    assert fitted.quadratic_cached_s == pytest.approx(-1e-9)


def test_decode_fit() -> None:
    step = DecodeStep(constant_s=8e-3, per_sequence_s=1e-4, per_kv_token_s=2e-7)
    samples = [
        StepSample(num_sequences=n, kv_tokens=k, seconds=step.seconds(n, k)) for n in (1, 4, 32) for k in (100, 9000)
    ]
    fitted = DecodeStep.fit(samples)
    assert fitted.seconds(16, 5000) == pytest.approx(step.seconds(16, 5000))
    assert step.scaled(0.5).seconds(16, 5000) == pytest.approx(step.seconds(16, 5000) / 2)


def test_candidates_in_one_call_are_the_same_numbers() -> None:
    cached = np.array([0, 16, 1024, 4096], np.int32)
    together = MODEL.prefill_s(4096, cached)
    assert together.tolist() == pytest.approx([MODEL.prefill_s(4096, int(c)) for c in cached])
    assert MODEL.scaled(0.5).prefill_s(4096, cached).tolist() == pytest.approx((together / 2).tolist())


def test_never_negative() -> None:
    below = ArchitectureModel(constant_s=0.0, linear_s=1e-6, quadratic_cached_s=-1.0)
    assert below.prefill_s(10, 5) == 0.0
    assert below.prefill_s(10, np.array([5, 9])).tolist() == [0.0, 0.0]


def test_is_a_cost_model() -> None:
    model: CostModel = MODEL
    assert (model.stages, model.decode_step_s(3, 100)) == (1, 1e-2)
    with pytest.raises(ConfigError, match="no decode part"):
        ArchitectureModel(constant_s=1.0, linear_s=1.0).decode_step_s(1, 1)


def test_transfer_time_is_bytes_over_bandwidth_and_calls() -> None:
    link = Link(bytes_per_s=10 * 2**30, latency_s=1e-3, per_call_s=1e-5)
    assert link.seconds(2048 * KV_BYTES, calls=128) == pytest.approx(1e-3 + 128e-5 + 0.15625)
    with pytest.raises(ConfigError, match="bytes_per_s must be positive, got 0"):
        Link(bytes_per_s=0)


def test_kv_is_moved_only_when_that_is_faster_than_computing_it() -> None:
    saved_s = MODEL.prefill_s(4096, 0) - MODEL.prefill_s(4096, 4000)
    break_even = 4000 * KV_BYTES / saved_s
    for factor, worthwhile in ((1.01, True), (0.99, False)):
        decision = MoveOrRecompute(
            model=MODEL, kv_link=KVLink(link=Link(bytes_per_s=break_even * factor), bytes_per_token=KV_BYTES)
        )
        move = decision.move(4096, held_here=0, held_there=4000)
        assert move.worthwhile is worthwhile
        assert (move.tokens, move.saved_s) == (4000, pytest.approx(saved_s))
        assert move.transfer_s == pytest.approx(saved_s / factor)


@pytest.mark.parametrize(("here", "there"), [(512, 512), (512, 256), (0, 0)])
def test_nothing_to_move(here: int, there: int) -> None:
    decision = MoveOrRecompute(model=MODEL, kv_link=KVLink(link=Link(bytes_per_s=1e12), bytes_per_token=KV_BYTES))
    move = decision.move(1024, here, there)
    assert (move.tokens, move.worthwhile) == (0, False)


def test_each_block_is_a_call() -> None:
    decision = MoveOrRecompute(
        model=MODEL, kv_link=KVLink(link=Link(bytes_per_s=1e18, per_call_s=1.0), bytes_per_token=1)
    )
    assert decision.move(1024, 0, 33).transfer_s == pytest.approx(3.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-9])
@pytest.mark.parametrize(
    ("kind", "setting", "others"),
    [
        (ArchitectureModel, "constant_s", {"linear_s": 0.1}),
        (ArchitectureModel, "linear_s", {"constant_s": 0.1}),
        (ArchitectureModel, "quadratic_s", {"constant_s": 0.1, "linear_s": 0.1}),
        (DecodeStep, "constant_s", {}),
        (DecodeStep, "per_sequence_s", {"constant_s": 0.1}),
        (DecodeStep, "per_kv_token_s", {"constant_s": 0.1}),
        (Link, "latency_s", {"bytes_per_s": 1.0}),
        (Link, "per_call_s", {"bytes_per_s": 1.0}),
    ],
)
def test_a_time_that_is_none_is_refused(kind: type[Any], setting: str, others: dict[str, float], value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{setting} must be finite and not negative, got {value}$"):
        kind(**{**others, setting: value})


def test_other_costs_that_are_none_are_refused() -> None:
    times = {"constant_s": 0.1, "linear_s": 0.1}
    with pytest.raises(ConfigError, match="quadratic_cached_s must be finite, got nan"):
        ArchitectureModel(**times, quadratic_cached_s=float("nan"))
    assert ArchitectureModel(**times, quadratic_cached_s=-1e-9).prefill_s(2, 1) > 0, "a pair that is cached takes less"
    with pytest.raises(ConfigError, match="stages must be at least 1, got 0"):
        ArchitectureModel(**times, stages=0)
    with pytest.raises(ConfigError, match="bytes_per_s must be positive, got nan"):
        Link(bytes_per_s=float("nan"))
