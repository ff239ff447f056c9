"""A report as a table on the terminal, and below it what it proves."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from poolweave.serving.flow_comparison.report import FlowReport, Moved, Report, Times

_SHOWN = 8  # lines of what went wrong; the JSON has them all


def print_report(report: Report, console: Console) -> None:
    """One row a flow, then whether tokens are equal, reuse is exact, and what failed."""
    table = Table(title="KV reuse and movement by flow", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("flow", no_wrap=True)
    table.add_column("prompt tokens\ncached, by turn", justify="right", no_wrap=True)
    table.add_column("P->D", justify="right", no_wrap=True)
    table.add_column("D->P", justify="right", no_wrap=True)
    table.add_column("TTFT\nmean, P99", justify="right", no_wrap=True)
    table.add_column("JCT\nmean, P99", justify="right", no_wrap=True)
    for flow in report.flows:
        table.add_row(*_row(flow), end_section=True)
    console.print(table)
    verdict(console, "every flow gives the same tokens", report.differing)
    surprises = [line for flow in report.flows for line in flow.surprises]
    verdict(console, "cached tokens and bytes sent are what the token lists predict", surprises)
    failures = [f"{flow.flow}, {line}" for flow in report.flows for line in flow.failures]
    verdict(console, "every request was answered", failures)


def _row(flow: FlowReport) -> tuple[str, ...]:
    cached = "\n".join(f"{turn.cached_tokens}/{turn.prompt_tokens} {turn.ratio:4.0%}" for turn in flow.turns)
    return (
        f"{flow.flow}\n{flow.requests} requests",
        cached,
        _moved(flow.to_decode),
        _moved(flow.to_prefill),
        _times(flow.ttft),
        _times(flow.jct),
    )


def _moved(moved: Moved) -> str:
    if not moved.calls and not moved.blocks:
        return "–"
    return f"{moved.nbytes / 2**20:.1f} MiB\n{moved.calls} calls"


def _times(times: Times) -> str:
    return f"{times.mean_s:.2f} s\n{times.p99_s:.2f} s"


def verdict(console: Console, claim: str, against: Sequence[str]) -> None:
    """A claim as it holds, or what speaks against it."""
    if not against:
        console.print(f"[green]✔[/green] {claim}")
        return
    console.print(f"[red]✘[/red] not so: {claim} ({len(against)} times)")
    for line in against[:_SHOWN]:
        console.print(f"    {line}", markup=False, highlight=False)
    if len(against) > _SHOWN:
        console.print(f"    and {len(against) - _SHOWN} more, in the JSON")
