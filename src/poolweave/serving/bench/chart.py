"""The transfer study as one picture: MemServe's Figures 11 and 12 on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from poolweave.serving.axes import INK, dress
from poolweave.serving.bench.points import ConnectionPoint, GranularityPoint, LayoutPoint, Study

_SHADES = {"discrete": ("#f5b36f", "#b5540a"), "aggregated": ("#6cc0a0", "#0c4a34")}  # fewest to most connections
_MARKS = ("o", "s", "^", "D", "v")
_COLOURS = {
    "by-req": "#f2a65a", "by-layer": "#4a90c4", "by-req-agg": "#8a8f94", "by-layer-agg": "#1b6e4f",
    "auto-agg": "#8e6bbf",
}  # fmt: skip
_WIDTHS = {"by-req": 4.0}  # it has as many calls as by-layer where blocks are discrete: both are to be seen
_LINES = {"by-req": "-", "by-layer": "-", "by-req-agg": "--", "by-layer-agg": "--", "auto-agg": ":"}


def draw(study: Study, path: Path) -> None:
    """Write the picture as PNG: a row a transport; latency and calls by size, both by load; what a connection costs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    transports = study.config.transports
    figure = Figure(figsize=(19, 0.8 + 4.2 * len(transports)), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    model = study.config.model
    figure.suptitle(
        f"KV transfer: {model.layers} layers x {model.kv_heads} heads x {model.head_dim}, {model.dtype}, "
        f"blocks of {model.block_tokens} tokens",
        color=INK,
    )
    for row, transport in zip(figure.subplots(len(transports), 4, squeeze=False), transports, strict=True):
        _latency(row[0], study, transport)
        _calls(row[1], study, transport)
        _over_load(row[2], study, transport)
        _calls_over_load(row[3], study, transport)
    if study.connections:
        costs = ", ".join(_cost(point) for point in study.connections)
        figure.supxlabel(f"One connected peer costs: {costs}", fontsize=9, color=INK)
    figure.savefig(path)


def _cost(point: ConnectionPoint) -> str:
    count = round(point.descriptors_each)
    return f"{point.transport} {point.direction} {point.kib_each:.0f} KiB and {count} descriptor{'s' * (count != 1)}"


def _latency(axis: Any, study: Study, transport: str) -> None:
    dress(axis, f"{transport}: one prompt's KV, offer to confirm", "ms, median", "tokens")
    known = sorted(set(study.config.connections))
    what = "connection" if transport == "tcp" else "thread"
    for (blocks, connections), points in _curves(study, transport).items():
        place = known.index(connections)
        axis.plot(
            [point.tokens for point in points], [point.median_s * 1e3 for point in points],
            "-" if not place else "--", marker=_MARKS[place % len(_MARKS)], markersize=5,
            color=_shade(blocks, place, len(known)),
            label=f"{blocks}, {connections} {what}{'s' if connections > 1 else ''}",
        )  # fmt: skip
    _finish(axis, study.config.tokens, log=True)


def _shade(blocks: str, place: int, count: int) -> Any:
    from matplotlib.colors import to_rgb

    light, dark = (to_rgb(colour) for colour in _SHADES[blocks])
    share = place / (count - 1) if count > 1 else 1.0
    return tuple(a + (b - a) * share for a, b in zip(light, dark, strict=True))


def _calls(axis: Any, study: Study, transport: str) -> None:
    dress(axis, f"{transport}: calls for it", "runs of memory", "tokens")
    for (blocks, connections), points in _curves(study, transport).items():
        if connections == min(study.config.connections):
            axis.plot(
                [point.tokens for point in points], [point.calls for point in points], marker="o", markersize=5,
                color=_SHADES[blocks][1], label=blocks,
            )  # fmt: skip
    _finish(axis, study.config.tokens, log=True)


def _over_load(axis: Any, study: Study, transport: str) -> None:
    dress(axis, f"{transport}: arrival to KV at the peer", "ms: mean (line), P99 (dots)", "load")
    for name, points in _granularities(study, transport).items():
        loads = [point.load for point in points]
        axis.plot(loads, [point.mean_s * 1e3 for point in points], _LINES[name], color=_COLOURS[name], label=name)
        axis.plot(loads, [point.p99_s * 1e3 for point in points], "o", markersize=4, color=_COLOURS[name], alpha=0.7)
    _finish(axis, study.config.loads, log=False)


def _calls_over_load(axis: Any, study: Study, transport: str) -> None:
    prompt = study.config.prompt_tokens
    dress(axis, f"{transport}: calls a prompt of {prompt} tokens", "runs of memory, mean", "load")
    for name, points in _granularities(study, transport).items():
        axis.plot(
            [point.load for point in points], [point.calls for point in points], _LINES[name], marker="o",
            markersize=4, linewidth=_WIDTHS.get(name, 1.5), color=_COLOURS[name], label=name,
        )  # fmt: skip
    if axis.lines:
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        axis.set_ylim(low, high * (high / low) ** 0.3)  # room for the legend above all lines
    _finish(axis, study.config.loads, log=False, legend={"loc": "upper left", "ncols": 3})


def _curves(study: Study, transport: str) -> dict[tuple[str, int], list[LayoutPoint]]:
    curves: dict[tuple[str, int], list[LayoutPoint]] = {}
    for point in sorted(study.layout, key=lambda one: one.tokens):
        if point.transport == transport:
            curves.setdefault((point.blocks, point.connections), []).append(point)
    return curves


def _granularities(study: Study, transport: str) -> dict[str, list[GranularityPoint]]:
    curves: dict[str, list[GranularityPoint]] = {}
    for point in sorted(study.granularity, key=lambda one: one.load):
        if point.transport == transport:
            curves.setdefault(point.granularity, []).append(point)
    return curves


def _finish(
    axis: Any, ticks: tuple[float, ...], *, log: bool, legend: Mapping[str, Any] = MappingProxyType({})
) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if not axis.lines:
        axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes, color=INK)
        return
    if log:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
    elif axis.get_yscale() == "linear":
        axis.set_ylim(bottom=0)
    plain: Callable[[float, int], str] = lambda value, _: f"{value:g}"  # noqa: E731
    axis.set_xticks(sorted(set(ticks)))
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_formatter(FuncFormatter(plain))
        one.set_minor_formatter(NullFormatter())
    axis.legend(fontsize=8, frameon=False, handlelength=3, **legend)
