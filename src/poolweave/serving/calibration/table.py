"""A calibration on the terminal: MemServe's Figure 14 as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from poolweave.scheduler.fitting import ErrorReport
from poolweave.scheduler.operators import CollectiveOperator, HopOperator
from poolweave.serving.calibration.fit import Fitted, HeldOut
from poolweave.serving.calibration.recorded import RecordedErrors


def print_calibration(fitted: Fitted, recorded: Sequence[RecordedErrors], console: Console) -> None:
    """The held-out prompts, then the errors of each fit, the links, and what recordings say of the forms."""
    found = fitted.calibration
    console.print(_points(fitted.points))
    errors = _table("Error on what no fit has seen", "fit", "points", "mean", "P90", "worst", "bias")
    for name, report in found.errors.items():
        errors.add_row(name, *_figures(report))
    for one in recorded:
        errors.add_row(f"{_short(one.name)} prefill", *_figures(one.prefill))
        errors.add_row(f"{_short(one.name)} decode", *_figures(one.decode))
    console.print(errors)
    links = _table(
        f"KV between processes, {found.kv_bytes_per_token} bytes a token", "link", "GB/s", "ms", "us a piece"
    )
    for name, link in found.links.items():
        rates = f"{link.bytes_per_s / 1e9:.2f}", f"{link.latency_s * 1e3:.3f}", f"{link.per_call_s * 1e6:.2f}"
        links.add_row(name, *rates)
    console.print(links)
    exchanged: dict[str, CollectiveOperator | HopOperator] = {
        **found.operators.collectives,
        **found.operators.hops,
    }
    if exchanged:
        between = _table("Between two ranks of one model", "exchange", "of a prompt", "GB/s", "ms")
        for name, exchange in exchanged.items():
            figures = str(exchange.count), f"{exchange.bytes_per_s / 1e9:.2f}", f"{exchange.latency_s * 1e3:.3f}"
            between.add_row(name, *figures)
        console.print(between)


def _points(points: Sequence[HeldOut]) -> Table:
    table = _table("Prompts unseen by the fits", "ranks", "tokens", "cached", "measured", "by operator", "whole model")
    for point in points:
        table.add_row(
            str(point.tp), str(point.prompt_tokens), str(point.cached_tokens), f"{point.measured_s * 1e3:.1f} ms",
            _against(point.operators_s, point.measured_s), _against(point.architecture_s, point.measured_s),
        )  # fmt: skip
    return table


def _against(predicted_s: float, measured_s: float) -> str:
    return f"{predicted_s * 1e3:.1f} ms {predicted_s / measured_s - 1:+.0%}"


def _figures(report: ErrorReport) -> tuple[str, ...]:
    return (
        str(report.num_points), f"{report.mean:.1%}", f"{report.p90:.1%}", f"{report.max:.1%}", f"{report.bias:+.1%}"
    )  # fmt: skip


def _short(name: str, most: int = 28) -> str:
    """The end of a long name, which tells recordings apart."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table
