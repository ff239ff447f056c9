"""What the transfer study measures: one value object a kind of point."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from poolweave.serving.bench.config import StudyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPoint:
    """MemServe Fig. 11: one transfer of a whole prompt, from offer to confirm."""

    transport: str
    blocks: str  # discrete | aggregated
    connections: int
    tokens: int
    nbytes: int
    calls: int
    median_s: float
    worst_s: float
    gain: float | None = None  # of aggregated blocks over discrete ones: the median over rounds, each with both

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.median_s / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class GranularityPoint:
    """MemServe Fig. 12: from a request's arrival until its KV is at the peer; `exposed_s` of it after its compute."""

    transport: str
    granularity: str
    load: float
    steps: float
    calls: float
    mean_s: float
    p99_s: float
    exposed_s: float
    early_share: float  # of the bytes, there before the last layer was computed


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionPoint:
    """What one more connected peer costs this process, once it has moved a block."""

    transport: str
    direction: str  # sending | receiving
    peers: int
    kib_each: float
    descriptors_each: float
    threads_each: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """All points of one run."""

    config: StudyConfig
    layout: tuple[LayoutPoint, ...] = ()
    granularity: tuple[GranularityPoint, ...] = ()
    connections: tuple[ConnectionPoint, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "config": self.config.as_json(),
            "layout": [{**asdict(point), "gb_per_s": point.gb_per_s} for point in self.layout],
            "granularity": [asdict(point) for point in self.granularity],
            "connections": [asdict(point) for point in self.connections],
        }
