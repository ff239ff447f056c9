"""An ablation as one picture, and a piece of the pipeline's timeline as another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poolweave.crosspool_engine.timeline import StageRun, overlap
from poolweave.serving.ablation.report import PAPER, AblationReport
from poolweave.serving.axes import INK, dress

_COLOURS = {"off/off": "#9aa0a6", "pipeline": "#f2a65a", "lowering": "#4a90c4", "both": "#1b6e4f"}
_MODELS = ("#1b6e4f", "#f2a65a", "#4a90c4", "#8e6bbf")
_WINDOW_MS = 2.0


def draw_ablation(report: AblationReport, path: Path) -> None:
    """Throughput to both off, and the time between tokens, as PNG. Draws off screen."""
    figure = _figure((11, 4.4))
    left, right = figure.subplots(1, 2)
    sizes = sorted({cell.hidden for cell in report.cells})
    dress(left, "Tokens/s, both off = 1", "ratio")
    dress(right, "Time between tokens", "ms")
    for number, (name, colour) in enumerate(_COLOURS.items()):
        own = [cell for cell in report.cells if cell.cell == name]
        places = [sizes.index(cell.hidden) + (number - 1.5) * 0.2 for cell in own]
        bars = left.bar(places, [cell.ratio for cell in own], 0.18, color=colour, label=f"{name} (paper {PAPER[name]})")
        left.bar_label(bars, [f"{cell.ratio:.2f}" for cell in own], fontsize=7, color=INK, padding=1)
        right.bar(places, [cell.tbt_ms_p50 for cell in own], 0.18, color=colour, label=name)
        for place, cell in zip(places, own, strict=True):
            right.vlines(place, cell.tbt_ms_p50, cell.tbt_ms_p99, color=INK, linewidth=1)
            right.scatter([place] * 2, [cell.tbt_ms_p95, cell.tbt_ms_p99], marker="_", s=60, color=INK)
    left.set_ylim(0, 1.4 * max(cell.ratio for cell in report.cells))
    right.text(0.01, 0.97, "bar: P50, marks: P95 and P99", transform=right.transAxes, va="top", fontsize=8, color=INK)
    left.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)
    for axis in (left, right):
        axis.set_xticks(range(len(sizes)), [f"hidden {size}" for size in sizes])
    figure.savefig(path)


def draw_timeline(report: AblationReport, path: Path) -> None:
    """Two milliseconds from the middle of a run, one in flight above two, one row a worker, as PNG."""
    figure = _figure((11, 4.2))
    axes = figure.subplots(len(report.stages), 1, squeeze=False)[:, 0]
    titles = {"lowering": "one batch in flight", "both": "two batches in flight"}
    for axis, (cell, stages) in zip(axes, report.stages.items(), strict=True):
        share = f"attention and FFN at once in {overlap(stages):.0%} of the busy time"
        dress(axis, f"{titles.get(cell, cell)}: {share}", "")
        _rows(axis, stages)
    axes[-1].set_xlabel("ms", fontsize=9, color=INK)
    figure.savefig(path)


def _rows(axis: Any, stages: Sequence[StageRun]) -> None:
    workers = sorted({stage.worker for stage in stages}, reverse=True)
    models = sorted({stage.model for stage in stages})
    middle = stages[len(stages) // 2].start_ns
    shown = [stage for stage in stages if middle <= stage.start_ns < middle + _WINDOW_MS * 1e6]
    for number, model in enumerate(models):
        for row, worker in enumerate(workers):
            spans = [
                ((s.start_ns - middle) / 1e6, (s.end_ns - s.start_ns) / 1e6)
                for s in shown
                if s.model == model and s.worker == worker
            ]
            axis.broken_barh(
                spans, (row - 0.4, 0.8), color=_MODELS[number % len(_MODELS)], edgecolor="white", linewidth=0.4,
                label=model if row == 0 else None,
            )  # fmt: skip
    axis.set_yticks(range(len(workers)), workers)
    axis.set_xlim(0, _WINDOW_MS)
    axis.legend(fontsize=8, frameon=False, loc="upper right", ncols=len(models), bbox_to_anchor=(1, 1.22))


def _figure(size: tuple[float, float]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=140, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure
