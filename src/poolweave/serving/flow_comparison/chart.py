"""A report as one picture: reuse by turn, what was moved, and the two times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from poolweave.serving.axes import INK, dress
from poolweave.serving.flow_comparison.report import FlowReport, Report, Times

_COLOURS = {
    "pd-basic": "#9aa0a6",
    "pd-caching-1": "#f2a65a",
    "pd-caching-2": "#4a90c4",
    "pd-caching-3": "#1b6e4f",
    "colocated": "#8e6bbf",
}
_MIB = 2**20


def draw(report: Report, path: Path, *, title: str) -> None:
    """Write the picture as PNG. Draws off screen: no window system is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.6), dpi=140, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    figure.suptitle(f"Context caching over prefill/decode disaggregation\n{title}", fontsize=13, color=INK)
    _cached(axes[0][0], report.flows)
    _moved(axes[0][1], report.flows)
    _times(axes[1][0], report.flows, "Time to first token", lambda flow: flow.ttft)
    _times(axes[1][1], report.flows, "Time to last token", lambda flow: flow.jct)
    figure.savefig(path)


def _cached(axis: Any, flows: Sequence[FlowReport]) -> None:
    dress(axis, "Prompt tokens found cached where they are prefilled", "% of the turn's prompt tokens")
    last = max(len(flow.turns) for flow in flows)
    width = 0.8 / len(flows)
    for number, flow in enumerate(flows):
        places = [turn + (number - (len(flows) - 1) / 2) * width for turn in range(len(flow.turns))]
        shares = [100 * turn.ratio for turn in flow.turns]
        bars = axis.bar(places, shares, width * 0.92, color=_colour(flow), label=flow.flow)
        axis.bar_label(bars, [f"{share:.0f}" for share in shares], fontsize=7, color=INK, padding=1)
    axis.set_xticks(range(last), [f"turn {turn + 1}" for turn in range(last)])
    axis.set_ylim(0, 132)
    axis.set_yticks(range(0, 101, 20))
    axis.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)


def _moved(axis: Any, flows: Sequence[FlowReport]) -> None:
    dress(axis, "KV moved between the instances", "MiB")
    places = range(len(flows))
    there = [flow.to_decode.nbytes / _MIB for flow in flows]
    back = [flow.to_prefill.nbytes / _MIB for flow in flows]
    axis.bar(places, there, 0.62, color=[_colour(flow) for flow in flows])
    axis.bar(places, back, 0.62, bottom=there, color="white", edgecolor=[_colour(flow) for flow in flows], hatch="////")
    for place, flow, total in zip(places, flows, map(sum, zip(there, back, strict=True)), strict=True):
        calls = flow.to_decode.calls + flow.to_prefill.calls
        text = f"{total:.0f} MiB\n{calls} calls" if total else "none"
        axis.text(place, total, text, ha="center", va="bottom", fontsize=8, color=INK)
    axis.set_xticks(places, [flow.flow for flow in flows], fontsize=8)
    axis.set_ylim(0, 1.2 * max([1.0, *(a + b for a, b in zip(there, back, strict=True))]))
    axis.text(0.99, 0.97, "solid: prefill to decode\nhatched: decode to prefill", transform=axis.transAxes, ha="right",
              va="top", fontsize=8, color=INK)  # fmt: skip


def _times(axis: Any, flows: Sequence[FlowReport], title: str, of: Callable[[FlowReport], Times]) -> None:
    dress(axis, title, "seconds")
    places = range(len(flows))
    means, tails = [of(flow).mean_s for flow in flows], [of(flow).p99_s for flow in flows]
    bars = axis.bar(places, means, 0.62, color=[_colour(flow) for flow in flows])
    axis.bar_label(bars, [f"{mean:.2f}" for mean in means], label_type="center", fontsize=8, color="white")
    axis.vlines(places, means, tails, color=INK, linewidth=1)
    axis.scatter(places, tails, marker="_", s=160, color=INK)
    for place, tail in zip(places, tails, strict=True):
        axis.text(place, tail * 1.015, f"P99 {tail:.2f}", ha="center", va="bottom", fontsize=8, color=INK)
    axis.set_xticks(places, [flow.flow for flow in flows], fontsize=8)
    axis.set_ylim(0, 1.18 * max([0.01, *tails]))


def _colour(flow: FlowReport) -> str:
    return _COLOURS.get(flow.flow, "#c65b5b")
