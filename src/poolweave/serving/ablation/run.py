"""Runs the four cells on one engine, in turn within each round, so that ratios come from one run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from poolweave.crosspool_engine import DecodeEngine, DecodeRequest, EngineConfig, Serving
from poolweave.crosspool_engine.timeline import StageRun
from poolweave.errors import ConfigError
from poolweave.serving.ablation.report import AblationReport, CellReport

CELLS: Mapping[str, tuple[bool, int]] = {  # control lowered, batches in flight
    "off/off": (False, 1),
    "lowering": (True, 1),
    "pipeline": (False, 2),
    "both": (True, 2),
}
_PROMPT = 8
_DRAWN = ("lowering", "both")  # the two that the timeline compares


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationConfig:
    """`requests` of each of three models at once, `tokens` new ones each, in every cell of every round."""

    hidden: tuple[int, ...] = (256, 512, 1024)
    layers: int = 8
    rounds: int = 5
    tokens: int = 48
    requests: int = 2
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("layers", "rounds", "tokens", "requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", setting=name, value=getattr(self, name), limit=1)
        wrong = [hidden for hidden in self.hidden if hidden < 128 or hidden % 64]
        if wrong or not self.hidden:
            raise ConfigError(f"hidden sizes are multiples of 64 from 128 on, got {wrong}", setting="hidden")


def run_ablation(config: AblationConfig) -> AblationReport:
    """Every hidden size with fresh models. Raises RuntimeError when two cells decode unlike tokens: a bug of ours."""
    cells: list[CellReport] = []
    stages: dict[str, tuple[StageRun, ...]] = {}
    for hidden in config.hidden:
        found, drawn = _run_size(config, hidden)
        cells += found
        stages = stages or drawn
    return AblationReport(tuple(cells), config.rounds, config.layers, stages)


def _run_size(config: AblationConfig, hidden: int) -> tuple[list[CellReport], dict[str, tuple[StageRun, ...]]]:
    from poolweave.crosspool_engine.models.random_models import save_random_models

    with tempfile.TemporaryDirectory() as folder:
        paths = save_random_models(Path(folder), hidden=hidden, layers=config.layers, dtype=config.dtype)
        with DecodeEngine(_engine_config(config, hidden)) as engine:
            for name, path in paths.items():
                engine.activate(name, Serving(path=path, dtype=config.dtype))
            return _rounds(engine, config, hidden)


def _engine_config(config: AblationConfig, hidden: int) -> EngineConfig:
    cores = sorted(os.sched_getaffinity(0))
    return EngineConfig(
        kv_budget="64MiB", max_models=3, max_tokens=_PROMPT + config.tokens, max_hidden=hidden, reuse=False,
        events=4096, cores=(cores[0], cores[-1]),
    )  # fmt: skip


def _rounds(
    engine: DecodeEngine, config: AblationConfig, hidden: int
) -> tuple[list[CellReport], dict[str, tuple[StageRun, ...]]]:
    rates: dict[str, list[float]] = {cell: [] for cell in CELLS}
    gaps: dict[str, list[np.ndarray]] = {cell: [] for cell in CELLS}
    stages: dict[str, tuple[StageRun, ...]] = {}
    expected: dict[str, list[int]] = {}
    for number in range(config.rounds + 1):  # the first warms up and is not counted
        for cell in CELLS:
            run = _run_cell(engine, cell, config)
            expected = expected or run.tokens
            if run.tokens != expected:
                raise RuntimeError(f"cell {cell} decoded other tokens than the first cell")
            if cell in _DRAWN:
                stages[cell] = tuple(s for s in engine.stages() if s.start_ns >= run.first_ns)
            if number:
                rates[cell].append(run.tokens_per_s)
                gaps[cell].append(run.gaps_ms)
    return [CellReport.of(cell, hidden, rates[cell], rates["off/off"], gaps[cell]) for cell in CELLS], stages


@dataclass(frozen=True, slots=True)
class _CellRun:
    tokens_per_s: float  # from the first token drawn to the last
    first_ns: int
    gaps_ms: np.ndarray
    tokens: dict[str, list[int]]


def _run_cell(engine: DecodeEngine, cell: str, config: AblationConfig) -> _CellRun:
    lowered, in_flight = CELLS[cell]
    engine.set_control(lowered=lowered, in_flight=in_flight)
    names = [(f"{model}/{n}", model) for n in range(config.requests) for model in engine.stats().models]
    for index, (name, model) in enumerate(names):
        prompt = [(37 * index + 11 * t) % 2048 for t in range(_PROMPT)]
        engine.add(DecodeRequest(request_id=name, model=model, tokens=prompt, max_new_tokens=config.tokens))
    while engine.has_work:
        engine.step()
    results = {name: engine.result(name) for name, _ in names}
    stamps = [result.stamps_ns for result in results.values()]
    first, last = min(s[0] for s in stamps), max(s[-1] for s in stamps)
    gaps = np.concatenate([np.diff(s) for s in stamps]) / 1e6
    rate = (sum(map(len, stamps)) - 1) / (last - first) * 1e9
    return _CellRun(rate, int(first), gaps, {name: result.tokens.tolist() for name, result in results.items()})
