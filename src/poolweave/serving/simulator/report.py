"""What a simulation found out: times, hits, balance. Values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Quantiles of a time, in seconds; NaN when nothing was measured."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        if not len(seconds):
            return cls(mean=float("nan"), p50=float("nan"), p90=float("nan"), p99=float("nan"))
        p50, p90, p99 = np.quantile(seconds, [0.5, 0.9, 0.99]).tolist()
        return cls(mean=float(np.mean(seconds)), p50=p50, p90=p90, p99=p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """`hit_ratio`: tokens really reused over prompt tokens; `believed_hit_ratio`: what the scheduler thought.

    `balance`: most over mean prefill time of the instances that prefill; 1 is even. `moved_bytes`: KV sent.
    `retried`: attempts that a death ended, each made again. `unfinished`: requests without an answer at the end.
    """

    policy: str
    flow: str
    num_requests: int
    answered: int
    unfinished: int
    retried: int
    ttft: Spread  # request start to first token
    jct: Spread  # request start to last token
    tpot: Spread  # mean gap between tokens of a request
    hit_ratio: float
    believed_hit_ratio: float
    balance: float
    moved_bytes: int
    simulated_s: float
    events: int
    expired_members: int

    def as_dict(self) -> Mapping[str, Any]:
        """Plain numbers, for JSON."""
        return asdict(self)
