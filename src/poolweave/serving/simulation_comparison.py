"""Which policies to compare on which simulated deployment, and what came out: the words of `poolweave simulate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poolweave.errors import ConfigError
from poolweave.scheduler.policies import POLICIES
from poolweave.scheduler.routes import SchedulerConfig
from poolweave.serving.simulator import (
    Flow,
    InstanceGroup,
    SimulationConfig,
    SimulationReport,
    Trace,
    compare_policies,
    llama2_13b_on_two_h800,
)
from poolweave.serving.simulator.trace_files import load_trace
from poolweave.types import Role

_TOLD_AT_ONCE = 100  # answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """As a user writes it: `instances` as "prefill=3,decode=1", `policies` as "prompt_tree,session". Raises ConfigError
    for unknown roles, policies and flows, and for instances that cannot answer."""

    instances: str
    policies: str
    flow: str = Flow.PD_CACHING_3.value
    cache_tokens: int = 140_000
    kv_tokens: int = 140_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in POLICIES:
                raise ConfigError(
                    f"policy {name!r} is none of {', '.join(POLICIES)}", setting="policies", value=self.policies
                )
        if not self.names:
            raise ConfigError(f"policies={self.policies!r} names none: {', '.join(POLICIES)}", setting="policies")
        self.config()  # refuses the rest

    @property
    def names(self) -> tuple[str, ...]:
        """Policies, each once, in the order given."""
        return tuple(dict.fromkeys(_words(self.policies)))

    def config(self) -> SimulationConfig:
        """The deployment; its policy is the first."""
        if self.flow not in [flow.value for flow in Flow]:
            flows = ", ".join(flow.value for flow in Flow)
            raise ConfigError(f"flow {self.flow!r} is none of {flows}", setting="flow", value=self.flow)
        return SimulationConfig(
            device=llama2_13b_on_two_h800(),
            instances=tuple(self._group(word) for word in _words(self.instances)),
            scheduler=SchedulerConfig(policy=self.names[0], seed=self.seed),
            flow=Flow(self.flow),
            seed=self.seed,
        )

    def trace(self, kind: str, path: Path, *, requests: int | None, rate: float | None) -> Trace:
        """The first `requests` of a recorded trace, at its own arrivals or at `rate` a second. Raises ConfigError."""
        trace = load_trace(kind, path)
        trace = trace if requests is None else trace.head(requests)
        if not trace.requests:
            raise ConfigError(f"trace file {path} holds no requests", setting="trace", value=str(path))
        return trace if rate is None else trace.at_rate(rate, self.seed)

    def _group(self, word: str) -> InstanceGroup:
        role, _, count = word.partition("=")
        if role not in [known.value for known in Role] or not count.isdecimal():
            raise ConfigError(
                f"instances={self.instances!r}: {word!r} is no role and count, as prefill=3,decode=1 or colocated=4",
                setting="instances",
                value=self.instances,
            )
        return InstanceGroup(
            role=Role(role), count=int(count), cache_tokens=self.cache_tokens, kv_tokens=self.kv_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One report a policy, in the order asked for; `trace` and `instances` say of what."""

    trace: str
    instances: str
    reports: Mapping[str, SimulationReport]

    @classmethod
    def of(cls, question: Question, trace: Trace, answered: Callable[[int], None]) -> Comparison:
        """Run them all. `answered(n)`: that many more requests are over."""
        count = 0

        def one_more() -> None:
            nonlocal count
            count += 1
            if count % _TOLD_AT_ONCE == 0:
                answered(_TOLD_AT_ONCE)

        reports = compare_policies(question.config(), trace, question.names, one_more)
        return cls(trace=trace.name, instances=question.instances, reports=reports)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON: what was not measured is null."""
        reports = {policy: _plain(report.as_dict()) for policy, report in self.reports.items()}
        return {"trace": self.trace, "instances": self.instances, "policies": reports}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
