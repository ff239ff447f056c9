"""Compared policies and flows as a table on the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from poolweave.serving.simulator.comparison import Comparison, Contrast
from poolweave.serving.simulator.report import SimulationReport


def print_simulation(comparison: Comparison, console: Console) -> None:
    """One row a series at each place, and where the first series differs least and most from the others."""
    title = f"{comparison.trace} on {comparison.instances}; times in seconds"
    moved = len(comparison.varied) < 2  # 80 columns have no room for all
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for axis in comparison.varied:
        table.add_column("req/s" if axis == "rate" else axis, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in (
        "TTFT\nP50",
        "\nP99",
        "JCT\nmean",
        "\nP99",
        "hit\nratio",
        "balance",
        *(["moved\nGiB"] if moved else []),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for place, reports in comparison.places.items():
        where = [f"{getattr(place, axis):g}" for axis in comparison.varied]
        for number, (series, report) in enumerate(reports.items()):
            shown = where if number == 0 else [""] * len(where)
            table.add_row(*shown, series, *_row(report, moved=moved), end_section=number == len(reports) - 1)
    console.print(table)
    console.print("balance: prefill time of the busiest instance over the mean; 1 is even", highlight=False)
    for series in comparison.series:
        console.print(_answers(series, [reports[series] for reports in comparison.places.values()]), highlight=False)
    for contrast in comparison.contrasts():
        console.print(_contrast(contrast, several=len(comparison.places) > 1), highlight=False)


def _row(report: SimulationReport, *, moved: bool) -> tuple[str, ...]:
    times = report.ttft.p50, report.ttft.p99, report.jct.mean, report.jct.p99
    last = (_short(report.moved_bytes / 2**30, 1),) if moved else ()
    return (*(_short(time, 3) for time in times), f"{report.hit_ratio:.0%}", f"{report.balance:.2f}", *last)


def _short(value: float, digits: int) -> str:
    """In six signs at most, up to 999,999."""
    return f"{value:.{digits if value < 100 else min(digits, 1) if value < 1000 else 0}f}"


def _answers(series: str, reports: list[SimulationReport]) -> str:
    answered, asked = sum(one.answered for one in reports), sum(one.num_requests for one in reports)
    retried, expired = sum(one.retried for one in reports), sum(one.expired_members for one in reports)
    again = f", {retried} attempts made again" if retried else ""
    gone = f", {expired} instances taken for dead" if expired else ""
    return f"{series}: {answered}/{asked} answered{again}{gone}"


def _contrast(one: Contrast, *, several: bool) -> str:
    what = f"{one.metric} of {one.first} against {one.other}: {one.best:+.0%}"
    if not several:
        return what
    mark = "✔ never worse" if one.never_worse else "not always better"
    return f"{what} at best ({one.best_at}), {one.worst:+.0%} at worst ({one.worst_at}); {mark}"
