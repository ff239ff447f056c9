"""Compared policies as a table on the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from poolweave.serving.simulation_comparison import Comparison
from poolweave.serving.simulator.report import SimulationReport, Spread


def print_simulation(comparison: Comparison, console: Console) -> None:
    """One row a policy."""
    title = f"{comparison.trace} on {comparison.instances}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in ("answered", "TTFT\nP50, P99", "JCT\nP50, P99", "hit\nratio", "balance", "KV moved\nGiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for policy, report in comparison.reports.items():
        table.add_row(policy, *_row(report), end_section=True)
    console.print(table)
    console.print("balance: prefill time of the busiest instance over the mean; 1 is even", highlight=False)


def _row(report: SimulationReport) -> tuple[str, ...]:
    return (
        f"{report.answered}/{report.num_requests}",
        _times(report.ttft),
        _times(report.jct),
        f"{report.hit_ratio:.1%}",
        f"{report.balance:.2f}",
        f"{report.moved_bytes / 2**30:.1f}",
    )


def _times(times: Spread) -> str:
    return f"{times.p50:.3f} s\n{times.p99:.3f} s"
