"""Both levels of cost model, from made-up measurements of which the truth is known."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
from poolweave.errors import ConfigError
from poolweave.scheduler.cost_model import PrefillSample, StepSample, TransferSample
from poolweave.scheduler.operators import (
    AttentionOperator,
    ExchangeSample,
    LinearOperator,
    Operator,
    OperatorModel,
    Parallelism,
    WaveOperator,
)
from poolweave.serving.calibration import CalibrateConfig
from poolweave.serving.calibration.fit import TILE_COLUMNS, TILE_TOKENS, fit, require_points
from poolweave.serving.calibration.measurement import REST, MeasuredPrompt, Measurements
from poolweave.serving.engine.operator_clock import OperatorKind
from poolweave.serving.engine.probe import ProbePoint
from poolweave.serving.engine.rank_exchanges import Exchanges
from poolweave.transfer import KVLayout

LAYERS, TP = 4, 2
TRUTH: dict[str, Operator] = {
    "q_proj": WaveOperator(
        count=LAYERS, tile_tokens=TILE_TOKENS, column_blocks=8, num_sms=1, full_wave_s=2e-5, last_wave_s=2.3e-5,
        weights_s=4e-4,
    ),
    "attention": AttentionOperator(count=LAYERS, a=-1e-8, b=1e-8, c=1e-7, d=1e-4, e=2e-6, f=2e-4),
    "norm": LinearOperator(count=2 * LAYERS, constant_s=3e-5, per_token_s=1e-6),
    REST: LinearOperator(count=1, constant_s=3e-3, per_token_s=2e-5),
}  # fmt: skip
KINDS = (
    OperatorKind("q_proj", "gemm", LAYERS, 8 * TILE_COLUMNS),
    OperatorKind("attention", "attention", LAYERS),
    OperatorKind("norm", "linear", 2 * LAYERS),
)
MODEL: Any = SimpleNamespace(layout=KVLayout(num_layers=LAYERS, kv_heads=2, head_dim=8, dtype="float32"))


def prompt(tokens: int, cached: int, noise: float = 1.0) -> MeasuredPrompt:
    new, length = np.array([float(tokens - cached)]), np.array([float(tokens)])
    parts = {
        name: noise * op.count * float(op.seconds(new, length, Parallelism())[0]) for name, op in TRUTH.items()
    }  # fmt: skip
    model = OperatorModel(operators=tuple(TRUTH.values()), parallelism=Parallelism(tp=TP))
    whole = PrefillSample(prompt_tokens=tokens, cached_tokens=cached, seconds=sum(parts.values()))
    share = replace(whole, seconds=noise * model.exact_s(tokens, cached))
    return MeasuredPrompt(whole=whole, parts=parts, share=share)


def measurements(noise: float = 0.0) -> Measurements:
    random = np.random.default_rng(7)
    prompts = [
        prompt(tokens, cached, 1 + noise * random.standard_normal())
        for tokens in (32, 64, 112, 160, 256)
        for cached in (0, tokens // 32 * 16)
    ]
    return Measurements(
        kinds=KINDS,
        prompts=tuple(prompts),
        steps=tuple(
            StepSample(num_sequences=n, kv_tokens=n * k, seconds=1 + n + 0.01 * n * k)
            for n in (1, 2, 4)
            for k in (9, 90)
        ),
        transfers={
            "shm": tuple(
                TransferSample(nbytes=n, calls=calls, seconds=1e-4 + n * 1e-9 + calls * 1e-6)
                for n in (10**6, 10**8)
                for calls in (1, 64)
            )
        },
        launches={"q_proj": 3e-6, "attention": 1e-4, "norm": 3e-5},
        tp=TP,
        exchanges=Exchanges(
            bytes_per_token=64,
            reduced=tuple(ExchangeSample(nbytes=n, seconds=1e-4 + n * 1e-9) for n in (64, 10**6)),
            sent=tuple(ExchangeSample(nbytes=n, seconds=5e-5 + n * 5e-10) for n in (64, 10**6)),
        ),
    )


def test_operators_hold_after_a_change_of_parallelism_and_the_whole_does_not() -> None:
    found = fit(MODEL, CalibrateConfig(), measurements())
    errors = found.calibration.errors
    assert errors["operators_tp1"].max < 1e-6 > errors["operators_tp2"].max
    assert errors["architecture_tp2"].mean > 0.05, "which divides what every rank does itself"
    fitted, truth = found.calibration.operators.attention["attention"], TRUTH["attention"]
    assert all(getattr(fitted, term) == pytest.approx(getattr(truth, term)) for term in "abcdef")
    gemm = found.calibration.operators.gemms["q_proj"]
    assert (gemm.full_wave_s, gemm.last_wave_s, gemm.weights_s) == pytest.approx((2e-5, 2.3e-5, 4e-4))


def test_every_prompt_is_held_out_once_at_each_number_of_ranks() -> None:
    taken = measurements(noise=0.02)
    found = fit(MODEL, CalibrateConfig(), taken)
    asked = [(one.whole.prompt_tokens, one.whole.cached_tokens) for one in taken.prompts]
    assert [(p.tp, p.prompt_tokens, p.cached_tokens) for p in found.points] == [
        (tp, *lengths) for tp in (1, TP) for lengths in sorted(asked)
    ]
    errors = found.calibration.errors
    assert errors["operators_tp2"].num_points == len(asked)
    assert errors["operators_tp2"].mean <= errors["architecture_tp2"].mean / 2


def test_what_ranks_send_each_other_is_fitted() -> None:
    found = fit(MODEL, CalibrateConfig(), measurements()).calibration.operators
    reduce, hop = found.collectives["all_reduce"], found.hops["stage"]
    assert (reduce.count, reduce.bytes_per_s, reduce.latency_s) == pytest.approx((2 * LAYERS, 1e9, 1e-4))
    assert (hop.bytes_per_s, hop.latency_s) == pytest.approx((2e9, 5e-5))


def test_too_few_prompts_are_refused_before_any_is_measured() -> None:
    asked = [ProbePoint(prompt_tokens=tokens, cached_tokens=cached) for tokens in (32, 64) for cached in (0, 16)]
    with pytest.raises(ConfigError, match="attention: 3 measured points cannot fit 5 terms; measure more"):
        require_points(asked, CalibrateConfig())
    one = [ProbePoint(prompt_tokens=tokens) for tokens in (16, 32, 48, 64, 80, 96, 112)]
    with pytest.raises(ConfigError, match="attention: a term is zero in all"):
        require_points(one, CalibrateConfig())
