"""What an ablation showed: tokens/s and times between tokens by cell. Values only."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from poolweave.crosspool_engine.timeline import StageRun, overlap

PAPER = {"off/off": 1.0, "lowering": 1.41, "pipeline": 1.10, "both": 2.01}  # tokens/s over both off, Table 3


@dataclass(frozen=True, slots=True)
class CellReport:
    """One cell at one hidden size: medians over the rounds; `ratio` is to both off, within a round."""

    cell: str
    hidden: int
    tokens_per_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    tbt_ms_p50: float
    tbt_ms_p95: float
    tbt_ms_p99: float

    @classmethod
    def of(
        cls, cell: str, hidden: int, rates: Sequence[float], off: Sequence[float], gaps_ms: Sequence[np.ndarray]
    ) -> CellReport:
        """`rates`, `off`: tokens/s of this cell and of both off in each round. `gaps_ms`: times between tokens."""
        ratios = [rate / base for rate, base in zip(rates, off, strict=True)]
        p50, p95, p99 = np.percentile(np.concatenate(list(gaps_ms)), [50, 95, 99])
        return cls(
            cell, hidden, statistics.median(rates), statistics.median(ratios), min(ratios), max(ratios), float(p50),
            float(p95), float(p99),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AblationReport:
    """All cells; `rounds` counted ones each. `stages`: a piece of the workers' timeline with lowering, by cell."""

    cells: tuple[CellReport, ...]
    rounds: int
    layers: int
    stages: dict[str, tuple[StageRun, ...]]

    def overlaps(self) -> dict[str, float]:
        """The part of the busy time in which attention and FFN workers computed at once, by cell."""
        return {cell: overlap(stages) for cell, stages in self.stages.items()}


def report_json(report: AblationReport) -> str:
    """For programs; the timeline is a file of its own."""
    cells = [dataclasses.asdict(cell) for cell in report.cells]
    return json.dumps(
        {
            "rounds": report.rounds, "layers": report.layers, "cells": cells, "paper_ratio": PAPER,
            "overlap": report.overlaps(),
        },
        indent=2,
    )  # fmt: skip
