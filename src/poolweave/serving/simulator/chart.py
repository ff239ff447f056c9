"""Compared policies and flows as one picture: bars where there is one place, curves over rates or shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from poolweave.serving.axes import INK, dress
from poolweave.serving.simulator.comparison import Comparison, Place
from poolweave.serving.simulator.report import SimulationReport, Spread

_COLOURS = ("#1b6e4f", "#4a90c4", "#f2a65a", "#8e6bbf", "#c65b5b", "#9aa0a6")
_STYLES = ("--", "-", ":", "-.")


def draw_simulation(comparison: Comparison, path: Path) -> None:
    """Write the picture as PNG. Draws off screen: no window system is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.2), dpi=140, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    figure.suptitle(f"Simulated: {comparison.trace} on {comparison.instances}", fontsize=13, color=INK)
    if comparison.varied:
        _curves(axes, comparison)
    else:
        _one_place(axes, comparison)
    figure.savefig(path, format="png")


# --- curves ----------------------------------------------------------------------------------------------


def _curves(axes: Any, comparison: Comparison) -> None:
    across, *other = comparison.varied
    words = "share of a prompt that others have too" if across == "share" else "requests a second"
    panels: tuple[tuple[str, str, bool, Callable[[SimulationReport], float]], ...] = (
        ("Time to first token, P99", "seconds", True, lambda report: report.ttft.p99),
        ("Time to last token, mean", "seconds", True, lambda report: report.jct.mean),
        ("Prompt tokens found cached", "%", False, lambda report: 100 * report.hit_ratio),
        ("Balance of prefills: 1 is even", "busiest / mean", False, lambda report: report.balance),
    )
    for axis, (title, unit, spread, of) in zip(axes.flat, panels, strict=True):
        dress(axis, title, unit, words)
        if spread:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
            axis.tick_params(which="minor", labelsize=7, colors=INK, length=0)
        for style, value in zip(_STYLES * len(comparison.places), _others(comparison, other), strict=False):
            _lines(axis, comparison, (across, *other), value, style, of)
    axes.flat[0].legend(fontsize=7, frameon=False)


def _others(comparison: Comparison, other: Sequence[str]) -> Sequence[float | None]:
    """Values of the second thing that varies: it has a line style each."""
    return list(dict.fromkeys(getattr(place, other[0]) for place in comparison.places)) if other else [None]


def _lines(
    axis: Any, comparison: Comparison, varied: Sequence[str], value: float | None, style: str,
    of: Callable[[SimulationReport], float],
) -> None:  # fmt: skip
    across, *other = varied
    places = [place for place in comparison.places if not other or getattr(place, other[0]) == value]
    places.sort(key=lambda place: float(getattr(place, across)))
    xs = [getattr(place, across) for place in places]
    for number, series in enumerate(comparison.series):
        label = series if not other else f"{series}, {_at(other[0], value)}"
        ys = [of(comparison.places[place][series]) for place in places]
        axis.plot(xs, ys, style, marker="o", markersize=3.5, color=_colour(number), label=label)


def _at(axis: str, value: float | None) -> str:
    return str(Place(rate=value) if axis == "rate" else Place(share=value))


# --- bars ------------------------------------------------------------------------------------------------


def _one_place(axes: Any, comparison: Comparison) -> None:
    reports = list(next(iter(comparison.places.values())).values())
    _times(axes[0][0], [report.ttft for report in reports], "Time to first token: bar P50, line P99")
    _times(axes[0][1], [report.jct for report in reports], "Time to last token: bar P50, line P99")
    _bars(axes[1][0], [100 * report.hit_ratio for report in reports], "Prompt tokens found cached", "%")
    _bars(axes[1][1], [report.balance for report in reports], "Balance of prefills: 1 is even", "busiest / mean")
    for axis in axes.flat:
        axis.set_xticks(range(len(reports)), comparison.series, fontsize=8)


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
    return [_colour(number) for number in range(count)]


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]
