"""What `poolweave plan` is asked: models, traces and devices from one TOML file. Reads files; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from poolweave.config import load
from poolweave.crosspool_engine.model_shape import ModelShape
from poolweave.crosspool_engine.planner.demand import Sampling, Workload
from poolweave.crosspool_engine.planner.planner import DEFAULT_PAGE_BYTES, Device, PlanRequest
from poolweave.crosspool_engine.planner.trace import read_trace
from poolweave.errors import ConfigError
from poolweave.types import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """`model`: a Hugging Face directory, of which only config.json is read. `trace`: a .csv or .jsonl, .xz or not.

    `rate_per_s` draws the trace's arrivals apart or together. `token_s`: seconds an output token, for a trace without
    service times. `arrivals`: as in the trace, or independent of each other at its rate.
    """

    name: str
    model: str
    trace: str
    rate_per_s: float | None = None
    token_s: float | None = None
    arrivals: Literal["poisson", "trace"] = "poisson"

    def workload(self, folder: Path) -> Workload:
        """Relative paths count from `folder`. Raises ModelNotFound, ConfigError."""
        trace = read_trace(folder / self.trace, token_s=self.token_s)
        if self.rate_per_s is not None:
            trace = trace.at_rate(self.rate_per_s)
        shape = ModelShape.from_directory(folder / self.model)
        return Workload(name=self.name, shape=shape, trace=trace, poisson=self.arrivals == "poisson")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDevices:
    """`count` equal devices; `reserve`: the part of their memory kept for activations and code."""

    count: int
    memory: int | str
    bandwidth_gb_per_s: float
    reserve: float = 0.1

    def device(self) -> Device:
        return Device(
            count=self.count, memory_bytes=parse_bytes(self.memory, "memory"),
            bandwidth_bytes_per_s=1e9 * self.bandwidth_gb_per_s, reserve=self.reserve,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """The file's sections: `[devices]`, `[[models]]`, and above them how to plan."""

    devices: PlannedDevices
    models: tuple[PlannedModel, ...]
    split: Literal["layer", "expert"] = "layer"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    page: int | str = DEFAULT_PAGE_BYTES
    block_tokens: int = 16
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("a plan needs at least one [[models]]", setting="models")


def read_plan_request(path: Path) -> PlanRequest:
    """Raises ConfigError or ModelNotFound, naming what is wrong in the file or in what it names."""
    asked = load(path, PlanFile)
    return PlanRequest(
        workloads=tuple(model.workload(path.parent) for model in asked.models), device=asked.devices.device(),
        sampling=asked.sampling, split=asked.split, page_bytes=parse_bytes(asked.page, "page"),
        block_tokens=asked.block_tokens, dtype_bytes={"float32": 4, "bfloat16": 2}[asked.dtype],
    )  # fmt: skip
