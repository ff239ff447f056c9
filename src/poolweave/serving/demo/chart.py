"""The demo as one picture: who computed when, the shared KV pool, reuse, and the time between tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poolweave.serving.axes import INK, dress
from poolweave.serving.demo.report import DemoReport, ModelReport
from poolweave.serving.demo.witness import Witness

_COLOURS = ("#1b6e4f", "#f2a65a", "#4a90c4", "#8e6bbf")


def draw_demo(report: DemoReport, witness: Witness, path: Path) -> None:
    """Write the picture as PNG. Draws off screen: no window system is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.6), dpi=140, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3)
    figure.suptitle("PD caching and CrossPool over three cold mixtures of experts", fontsize=13, color=INK)
    colours = {model.name: colour for model, colour in zip(report.models, _COLOURS, strict=False)}
    _timeline(figure.add_subplot(grid[0, :]), report, witness, colours)
    _pool(figure.add_subplot(grid[1, 0]), report, witness, colours)
    _cached(figure.add_subplot(grid[1, 1]), report.models, colours)
    _gaps(figure.add_subplot(grid[1, 2]), report.models, colours)
    figure.savefig(path)


def _timeline(axis: Any, report: DemoReport, witness: Witness, colours: dict[str, str]) -> None:
    """Above: whose prompt the prefill process computed, from its turn to its first token. Below: each decoded token."""
    dress(axis, "One prefill process switches; CrossPool decodes all models side by side", "", "seconds")
    names = [model.name for model in report.models]
    top, before = len(names), 0.0
    for seen in witness.prompts():
        start = max(before, seen.asked_s)
        axis.barh(top, seen.at_s - start, left=start, height=0.62, color=colours[seen.model], edgecolor="white")
        before = seen.at_s
    for number, name in enumerate(names):
        times = [seen.at_s for seen in witness.tokens if seen.model == name and seen.index > 0]
        axis.vlines(times, number - 0.3, number + 0.3, color=colours[name], linewidth=0.9)
    axis.set_yticks(range(top + 1), [*(f"decode {name}" for name in names), "prefill"])
    axis.grid(axis="y", visible=False)


def _pool(axis: Any, report: DemoReport, witness: Witness, colours: dict[str, str]) -> None:
    dress(axis, "Pages of the one KV pool", "pages mapped", "seconds")
    times = [look.at_s for look in witness.looks]
    rows = [[look.pages.get(model.name, 0) for look in witness.looks] for model in report.models]
    axis.stackplot(times, rows, colors=[colours[model.name] for model in report.models], step="post",
                   labels=[model.name for model in report.models])  # fmt: skip
    axis.axhline(report.budget_pages, color=INK, linewidth=0.8, linestyle=":")
    axis.text(0, report.budget_pages, "budget", fontsize=8, va="bottom", color=INK)
    axis.set_ylim(0, 1.35 * report.budget_pages)
    axis.legend(fontsize=8, frameon=False, loc="upper right", ncols=3)


def _cached(axis: Any, models: Sequence[ModelReport], colours: dict[str, str]) -> None:
    dress(axis, "Prompt tokens found cached at prefill", "% of the turn's prompt tokens")
    width = 0.8 / len(models)
    last = max(len(model.turns) for model in models)
    for number, model in enumerate(models):
        places = [turn + (number - (len(models) - 1) / 2) * width for turn in range(len(model.turns))]
        shares = [100 * turn.ratio for turn in model.turns]
        bars = axis.bar(places, shares, width * 0.92, color=colours[model.name])
        axis.bar_label(bars, [f"{share:.0f}" for share in shares], fontsize=7, color=INK, padding=1)
    axis.set_xticks(range(last), [f"turn {turn + 1}" for turn in range(last)])
    axis.set_ylim(0, 110)


def _gaps(axis: Any, models: Sequence[ModelReport], colours: dict[str, str]) -> None:
    dress(axis, "Time between tokens", "ms")
    places = range(len(models))
    middles = [1e3 * model.tbt.mean_s for model in models]
    tails = [1e3 * model.tbt.p99_s for model in models]
    axis.bar(places, middles, 0.62, color=[colours[model.name] for model in models])
    axis.vlines(places, middles, tails, color=INK, linewidth=1)
    for place, tail in zip(places, tails, strict=True):
        axis.text(place, tail, f"P99 {tail:.0f}", ha="center", va="bottom", fontsize=8, color=INK)
    labels = [f"{model.name}\nmean {middle:.0f}" for model, middle in zip(models, middles, strict=True)]
    axis.set_xticks(places, labels, fontsize=8)
    axis.set_ylim(0, 1.18 * max([1e-3, *tails]))
