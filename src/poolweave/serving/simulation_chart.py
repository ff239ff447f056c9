"""Compared policies as one picture: the two times, reuse and balance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poolweave.serving.axes import INK, dress
from poolweave.serving.simulation_comparison import Comparison
from poolweave.serving.simulator.report import Spread

_COLOURS = ("#1b6e4f", "#4a90c4", "#f2a65a", "#8e6bbf", "#9aa0a6")


def draw_simulation(comparison: Comparison, path: Path) -> None:
    """Write the picture as PNG. Draws off screen: no window system is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.2), dpi=140, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    figure.suptitle(
        f"Routing policies, simulated: {comparison.trace} on {comparison.instances}", fontsize=13, color=INK
    )
    reports = list(comparison.reports.values())
    _times(axes[0][0], [report.ttft for report in reports], "Time to first token: bar P50, line P99")
    _times(axes[0][1], [report.jct for report in reports], "Time to last token: bar P50, line P99")
    _bars(axes[1][0], [100 * report.hit_ratio for report in reports], "Prompt tokens found cached", "%")
    _bars(axes[1][1], [report.balance for report in reports], "Balance of prefills: 1 is even", "busiest / mean")
    for axis in axes.flat:
        axis.set_xticks(range(len(reports)), list(comparison.reports), fontsize=8)
    figure.savefig(path, format="png")


def _times(axis: Any, spreads: Sequence[Spread], title: str) -> None:
    dress(axis, title, "seconds")
    places = range(len(spreads))
    middles, tails = [spread.p50 for spread in spreads], [spread.p99 for spread in spreads]
    axis.bar(places, middles, 0.62, color=_colours(len(spreads)))
    axis.vlines(places, middles, tails, color=INK, linewidth=1)
    axis.scatter(places, tails, marker="_", s=160, color=INK)
    for place, middle, tail in zip(places, middles, tails, strict=True):
        axis.text(place, tail, f"P50 {middle:.3g}, P99 {tail:.3g}", ha="center", va="bottom", fontsize=8, color=INK)
    axis.margins(y=0.15)


def _bars(axis: Any, values: Sequence[float], title: str, unit: str) -> None:
    dress(axis, title, unit)
    bars = axis.bar(range(len(values)), values, 0.62, color=_colours(len(values)))
    axis.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=8, color=INK, padding=1)
    axis.margins(y=0.15)


def _colours(count: int) -> list[str]:
    return [_COLOURS[number % len(_COLOURS)] for number in range(count)]
