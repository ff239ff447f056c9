"""KV demand against a sum over requests, against Little's law, and against quantiles known in closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolweave.crosspool_engine.model_shape import ModelShape
from poolweave.crosspool_engine.planner import Trace, Workload, estimate_demand
from poolweave.crosspool_engine.planner.demand import DemandCurve, Sampling, little_tokens, sample_tokens
from poolweave.errors import ConfigError


def brute_force(trace: Trace, t: float) -> tuple[float, int]:
    """K_M(t) / kappa and the number in service, summed request by request over all past periods."""
    tokens, requests = 0.0, 0
    for arrival, prompt, output, service in zip(
        trace.arrival_s, trace.prompt_tokens, trace.output_tokens, trace.service_s, strict=True
    ):
        u = t - arrival
        while u < service:
            if u >= 0:
                tokens, requests = tokens + prompt + output * u / service, requests + 1
            u += trace.period_s
    return tokens, requests


def random_trace(seed: int, n: int) -> Trace:
    rng = np.random.default_rng(seed)
    return Trace(
        rng.exponential(1.0, n).cumsum(), rng.integers(1, 4000, n).astype(float),
        rng.integers(0, 500, n).astype(float), rng.choice([0.0, 0.5, 3.0, 40.0], n),
    )  # fmt: skip


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 40))
def test_curve_equals_the_sum_over_requests(seed: int, n: int) -> None:
    trace = random_trace(seed, n)
    moments = np.random.default_rng(seed).random(7) * trace.period_s
    tokens, requests = DemandCurve(trace).at(moments)
    for t, got, count in zip(moments, tokens, requests, strict=True):
        want, served = brute_force(trace, t)
        assert got == pytest.approx(want, abs=1e-6 * max(1.0, want))
        assert count == served


@pytest.mark.parametrize("poisson", [True, False])
def test_mean_obeys_littles_law(configs: dict[str, Any], poisson: bool) -> None:
    shape = ModelShape.from_config(configs["glm"])
    workload = Workload(name="glm", shape=shape, trace=random_trace(5, 300), poisson=poisson)
    got = estimate_demand((workload,), Sampling(draws=40_000), block_tokens=16, dtype_bytes=2)
    assert got.little_bytes == pytest.approx(54_144 * little_tokens(workload.trace))
    assert abs(got.mean_bytes - got.little_bytes) < 4 * got.mean_error_bytes
    assert got.mean_error_bytes < 0.01 * got.mean_bytes  # the check can fail


def test_a_wrong_law_is_noticed(configs: dict[str, Any]) -> None:
    """The negative control of the check above: tokens counted at their final number are far outside the error."""
    trace = random_trace(5, 300)
    whole = Trace(trace.arrival_s, trace.prompt_tokens + trace.output_tokens, 0 * trace.output_tokens, trace.service_s)
    shape = ModelShape.from_config(configs["glm"])
    got = estimate_demand(
        (Workload(name="glm", shape=shape, trace=whole),), Sampling(draws=40_000), block_tokens=16, dtype_bytes=2
    )
    assert abs(got.mean_bytes - 54_144 * little_tokens(trace)) > 4 * got.mean_error_bytes


def test_poisson_percentile_against_its_closed_form(configs: dict[str, Any]) -> None:
    """Equal requests without output hold `prompt` tokens each, so demand is a Poisson variable times a constant."""
    n, service, prompt = 100, 2.0, 84.0
    trace = Trace(np.arange(n) / 10.0, np.full(n, prompt), np.zeros(n), np.full(n, service))  # 20 in service
    shape = ModelShape.from_config(configs["qwen3"])
    got = estimate_demand(
        (Workload(name="q", shape=shape, trace=trace),), Sampling(draws=50_000), block_tokens=16, dtype_bytes=2
    )
    assert got.percentile_bytes == 31 * (prompt + 16) * 98_304  # 99th percentile of Poisson(20) is 31
    assert got.low_bytes <= got.percentile_bytes <= got.high_bytes


def test_interval_covers_the_truth_as_often_as_it_says(configs: dict[str, Any]) -> None:
    shape = ModelShape.from_config(configs["deepseek"])
    workload = Workload(name="d", shape=shape, trace=random_trace(1, 200))
    truth = estimate_demand(
        (workload,), Sampling(draws=400_000, seed=99, percentile=0.95), block_tokens=16, dtype_bytes=2
    ).percentile_bytes
    hits = 0
    for seed in range(100):
        sampling = Sampling(draws=2_000, seed=seed, percentile=0.95, confidence=0.9)
        got = estimate_demand((workload,), sampling, block_tokens=16, dtype_bytes=2)
        hits += got.low_bytes <= truth <= got.high_bytes
    assert 80 <= hits <= 99


def test_pooling_models_needs_less_than_their_percentiles_together(configs: dict[str, Any]) -> None:
    workloads = tuple(
        Workload(name=name, shape=ModelShape.from_config(configs[name]), trace=random_trace(seed, 100))
        for seed, name in enumerate(("qwen3", "glm", "deepseek"))
    )
    got = estimate_demand(workloads, Sampling(), block_tokens=16, dtype_bytes=2)
    assert got.high_bytes < sum(got.model_bytes)


def test_a_trace_that_holds_nothing(configs: dict[str, Any]) -> None:
    idle = Trace(np.zeros(1), np.ones(1), np.ones(1), np.zeros(1))
    for poisson in (True, False):
        workload = Workload(name="q", shape=ModelShape.from_config(configs["qwen3"]), trace=idle, poisson=poisson)
        tokens, requests = sample_tokens(workload, 10, np.random.default_rng(0))
        assert not tokens.any()
        assert not requests.any()


def test_too_few_draws_for_the_percentile() -> None:
    with pytest.raises(ConfigError, match="3000 or more") as caught:
        Sampling(percentile=0.99, draws=1_000)
    assert caught.value.limit == 3_000
    with pytest.raises(ConfigError, match="confidence"):
        Sampling(confidence=1.0)
