"""What came out of comparing policies or flows: a report of each at each rate and share, and how they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from poolweave.serving.simulator.question import Question
from poolweave.serving.simulator.report import SimulationReport
from poolweave.serving.simulator.simulation import Simulation
from poolweave.serving.simulator.trace_choice import TraceChoice, Workload

_TOLD_AT_ONCE = 100  # answers
_SAME = 0.005  # P99s that differ by less are the same to a reader of three digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where on the axes a report stands; None: as recorded."""

    rate: float | None = None
    share: float | None = None

    def __str__(self) -> str:
        share = None if self.share is None else f"share {self.share:g}"
        rate = None if self.rate is None else f"{self.rate:g} requests/s"
        return " and ".join(word for word in (share, rate) if word) or "the recorded times"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """A time of the first series over another's, minus 1, where that is least and where it is most."""

    first: str
    other: str
    metric: str
    best: float
    best_at: Place
    worst: float
    worst_at: Place

    @property
    def never_worse(self) -> bool:
        return self.worst <= _SAME


METRICS: Mapping[str, Callable[[SimulationReport], float]] = {
    "P99 TTFT": lambda report: report.ttft.p99,
    "mean JCT": lambda report: report.jct.mean,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Reports by series at each place, in the order asked for; `trace` and `instances` say of what."""

    trace: str
    instances: str
    places: Mapping[Place, Mapping[str, SimulationReport]]

    @classmethod
    def of(
        cls, question: Question, choice: TraceChoice, begun: Callable[[Workload, int], Callable[[int], None]]
    ) -> Comparison:
        """Run them all. `begun(workload, requests)` gives what is told that so many more requests are over."""
        places, name = {}, choice.kind
        series = question.series()
        for workload in choice.workloads():
            name = workload.trace.name if workload.share is None else choice.kind
            count = _Counter(begun(workload, len(series) * len(workload.trace.requests)))
            places[Place(rate=workload.rate, share=workload.share)] = {
                name: Simulation(config, workload.trace, count.one_more).run() for name, config in series.items()
            }
        return cls(trace=name, instances=question.instances, places=places)

    @property
    def series(self) -> tuple[str, ...]:
        return tuple(next(iter(self.places.values())))

    @property
    def varied(self) -> tuple[str, ...]:
        """Of share and rate those with more than one value."""
        return tuple(axis for axis in ("share", "rate") if len({getattr(place, axis) for place in self.places}) > 1)

    def contrasts(self) -> Iterator[Contrast]:
        """The first series against each other one, in each of METRICS, where both answered."""
        first, *others = self.series
        for metric, of in METRICS.items():
            for other in others:
                ratios = {
                    place: of(reports[first]) / of(reports[other]) - 1
                    for place, reports in self.places.items()
                    if reports[first].answered and reports[other].answered
                }
                if ratios:
                    best, worst = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
                    yield Contrast(
                        first=first, other=other, metric=metric,
                        best=ratios[best], best_at=best, worst=ratios[worst], worst_at=worst,
                    )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON: what was not measured is null."""
        points = [
            {"series": name, "rate": place.rate, "share": place.share, **_plain(report.as_dict())}
            for place, reports in self.places.items()
            for name, report in reports.items()
        ]
        contrasts = [
            {"first": one.first, "other": one.other, "metric": one.metric, "best": one.best, "worst": one.worst}
            for one in self.contrasts()
        ]
        return {"trace": self.trace, "instances": self.instances, "points": points, "contrasts": contrasts}


class _Counter:
    """Tells every hundredth time: a progress bar costs more than a request."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._count = 0

    def one_more(self) -> None:
        self._count += 1
        if self._count % _TOLD_AT_ONCE == 0:
            self._tell(_TOLD_AT_ONCE)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value
