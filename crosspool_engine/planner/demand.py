"""KV demand over time: Q_i(u), K_M(t), and its high percentile over all models by Monte-Carlo.

Pure: traces and a seed in, numbers out. Source: CrossPool planner: `Q_i(u) = O_p + O_d u / T` while a request is
served, `K_M(t) = sum_i kappa(M) Q_i(t - A_i)`; the mean must obey Little's law, rate * kappa * E[T (O_p + O_d / 2)].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from poolweave.crosspool_engine.model_shape import ModelShape
from poolweave.crosspool_engine.planner.trace import FloatArray, Trace
from poolweave.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one model is asked for. `poisson`: arrivals at the trace's rate, independent; else as in the trace."""

    name: str
    shape: ModelShape
    trace: Trace
    poisson: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the percentile is estimated. Raises ConfigError where too few draws lie beyond the percentile to say."""

    percentile: float = 0.99
    confidence: float = 0.95
    draws: int = 20_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("percentile", "confidence"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must lie between 0 and 1, got {getattr(self, name)}", setting=name,
                    value=getattr(self, name),
                )  # fmt: skip
        needed = math.ceil(30 / (1 - self.percentile))
        if self.draws < needed:
            raise ConfigError(
                f"{self.draws} draws leave under 30 beyond percentile {self.percentile}; use {needed} or more",
                setting="draws", value=self.draws, limit=needed,
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandEstimate:
    """Bytes of KV that the models hold together. `low` and `high` bound the percentile at the confidence asked for.

    `mean_bytes` and `little_bytes` are over the tokens alone and must agree within sampling error; the percentile
    counts whole blocks, one more than full a request. `model_bytes` is each model's own percentile.
    """

    percentile_bytes: float
    low_bytes: float
    high_bytes: float
    mean_bytes: float
    mean_error_bytes: float
    little_bytes: float
    model_bytes: tuple[float, ...]


class DemandCurve:
    """K_M(t) in tokens for one trace that begins again after its period, so that every moment is a steady one.

    Between events the sum is linear in t: sums over the starts and ends passed so far give any moment in O(log n).
    """

    def __init__(self, trace: Trace) -> None:
        kept = trace.service_s > 0
        period = trace.period_s
        copies = math.ceil(float(trace.service_s.max(initial=0.0)) / period) + 1
        shift = np.repeat(np.arange(copies), int(kept.sum())) * period
        start = np.tile(trace.arrival_s[kept], copies) - shift
        service, prompt, output = (
            np.tile(array[kept], copies) for array in (trace.service_s, trace.prompt_tokens, trace.output_tokens)
        )
        slope = output / service
        terms = np.stack([prompt - slope * start, slope, np.ones_like(start)])  # tokens at t = 0, tokens/s, requests
        self.period_s = period
        self._starts, self._started = _running_sum(start, terms)
        self._ends, self._ended = _running_sum(start + service, terms)

    def at(self, t: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Tokens held and requests served at each moment of `t`; moments lie in [0, period_s)."""
        started = self._started[:, np.searchsorted(self._starts, t, side="right")]
        ended = self._ended[:, np.searchsorted(self._ends, t, side="right")]
        offset, slope, requests = started - ended
        return np.maximum(offset + slope * t, 0.0), np.maximum(np.round(requests), 0.0)


def little_tokens(trace: Trace) -> float:
    """Mean tokens held, by Little's law."""
    return trace.rate_per_s * float(np.mean(trace.service_s * (trace.prompt_tokens + trace.output_tokens / 2)))


def sample_tokens(workload: Workload, draws: int, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Tokens held and requests served by one model at `draws` independent moments.

    With Poisson arrivals the number in service is Poisson of mean rate * E[T], each of them is met in proportion to
    its service time and at a uniform point of it: exact for any service time (M/G/infinity).
    """
    trace = workload.trace
    if not workload.poisson:
        curve = DemandCurve(trace)
        return curve.at(rng.random(draws) * curve.period_s)
    total = float(trace.service_s.sum())
    if total == 0:
        return np.zeros(draws), np.zeros(draws)
    requests = rng.poisson(trace.rate_per_s * total / len(trace), draws)
    which = rng.choice(len(trace), int(requests.sum()), p=trace.service_s / total)
    held = trace.prompt_tokens[which] + trace.output_tokens[which] * rng.random(len(which))
    draw = np.repeat(np.arange(draws), requests)
    return np.bincount(draw, weights=held, minlength=draws).astype(np.float64), requests.astype(np.float64)


def estimate_demand(
    workloads: tuple[Workload, ...], sampling: Sampling, *, block_tokens: int, dtype_bytes: int
) -> DemandEstimate:
    """The percentile of the models' KV together, its interval, and the Little's-law check.

    The interval comes from order statistics: distribution-free, draws being independent.
    """
    rng = np.random.default_rng(sampling.seed)
    tokens = np.zeros((len(workloads), sampling.draws))
    blocked = np.zeros_like(tokens)
    for row, workload in enumerate(workloads):
        kappa = workload.shape.kv_bytes_per_token(dtype_bytes)
        held, requests = sample_tokens(workload, sampling.draws, rng)
        tokens[row] = kappa * held
        blocked[row] = kappa * (held + block_tokens * requests)  # a last block may be nearly empty
    total = np.sort(blocked.sum(axis=0))
    middle, low, high = _quantile_ranks(sampling)
    sums = tokens.sum(axis=0)
    little = sum(w.shape.kv_bytes_per_token(dtype_bytes) * little_tokens(w.trace) for w in workloads)
    return DemandEstimate(
        percentile_bytes=float(total[middle]),
        low_bytes=float(total[low]),
        high_bytes=float(total[high]),
        mean_bytes=float(sums.mean()),
        mean_error_bytes=float(sums.std(ddof=1) / math.sqrt(sampling.draws)),
        little_bytes=little,
        model_bytes=tuple(float(x) for x in np.sort(blocked, axis=1)[:, high]),
    )


def _running_sum(times: FloatArray, terms: FloatArray) -> tuple[FloatArray, npt.NDArray[np.float64]]:
    order = np.argsort(times, kind="stable")
    sums = np.zeros((len(terms), len(times) + 1))
    np.cumsum(terms[:, order], axis=1, out=sums[:, 1:])
    return times[order], sums


def _quantile_ranks(sampling: Sampling) -> tuple[int, int, int]:
    n, q = sampling.draws, sampling.percentile
    spread = NormalDist().inv_cdf(0.5 + sampling.confidence / 2) * math.sqrt(n * q * (1 - q))
    ranks = (n * q, n * q - spread, n * q + spread + 1)
    middle, low, high = (min(max(math.ceil(rank) - 1, 0), n - 1) for rank in ranks)
    return middle, low, high
