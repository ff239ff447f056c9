"""The transfer study as one picture: MemServe's Figures 11 and 12 on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from poolweave.serving.axes import INK, dress
from poolweave.serving.bench.points import Study

_COLOURS = {
    "discrete": "#f2a65a", "aggregated": "#1b6e4f", "by-req": "#f2a65a", "by-layer": "#4a90c4",
    "by-req-agg": "#9aa0a6", "by-layer-agg": "#1b6e4f", "auto-agg": "#8e6bbf",
}  # fmt: skip


def draw(study: Study, path: Path) -> None:
    """Write the picture as PNG: a row a transport, latency and calls by size, latency by load."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    transports = study.config.transports
    figure = Figure(figsize=(13, 3.9 * len(transports)), dpi=140, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    model = study.config.model
    figure.suptitle(
        f"KV transfer: {model.layers} layers x {model.kv_heads} heads x {model.head_dim}, {model.dtype}, "
        f"blocks of {model.block_tokens} tokens",
        color=INK,
    )
    for row, transport in zip(figure.subplots(len(transports), 3, squeeze=False), transports, strict=True):
        _latency(row[0], study, transport)
        _calls(row[1], study, transport)
        _over_load(row[2], study, transport)
    figure.savefig(path)


def _latency(axis: Any, study: Study, transport: str) -> None:
    dress(axis, f"{transport}: one prompt's KV", "ms", "tokens")
    for (blocks, connections), points in _curves(study, transport).items():
        style = "-" if connections == min(study.config.connections) else "--"
        axis.plot(
            [point.tokens for point in points], [point.median_s * 1e3 for point in points], style, marker="o",
            markersize=4, color=_COLOURS[blocks], label=f"{blocks}, {connections} connection(s)",
        )  # fmt: skip
    _finish(axis, log=True)


def _calls(axis: Any, study: Study, transport: str) -> None:
    dress(axis, f"{transport}: calls", "runs of memory", "tokens")
    for (blocks, connections), points in _curves(study, transport).items():
        if connections == min(study.config.connections):
            axis.plot(
                [point.tokens for point in points], [point.calls for point in points], marker="o", markersize=4,
                color=_COLOURS[blocks], label=blocks,
            )  # fmt: skip
    _finish(axis, log=True)


def _over_load(axis: Any, study: Study, transport: str) -> None:
    dress(axis, f"{transport}: arrival to KV at the peer", "ms, mean (line) and P99 (dots)", "load")
    curves: dict[str, list[Any]] = {}
    for point in study.granularity:
        if point.transport == transport:
            curves.setdefault(point.granularity, []).append(point)
    for name, points in curves.items():
        loads = [point.load for point in points]
        axis.plot(loads, [point.mean_s * 1e3 for point in points], color=_COLOURS[name], label=name)
        axis.plot(loads, [point.p99_s * 1e3 for point in points], "o", markersize=4, color=_COLOURS[name])
    _finish(axis, log=False)


def _curves(study: Study, transport: str) -> dict[tuple[str, int], list[Any]]:
    curves: dict[tuple[str, int], list[Any]] = {}
    for point in study.layout:
        if point.transport == transport:
            curves.setdefault((point.blocks, point.connections), []).append(point)
    return curves


def _finish(axis: Any, *, log: bool) -> None:
    if not axis.lines:
        axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes, color=INK)
        return
    if log:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    axis.legend(fontsize=7, frameon=False)
