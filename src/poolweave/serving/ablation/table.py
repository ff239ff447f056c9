"""An ablation as a table on the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from poolweave.serving.ablation.report import PAPER, AblationReport


def print_ablation(report: AblationReport, console: Console) -> None:
    """One row a hidden size and cell, then what the timeline shows."""
    title = f"Decode throughput by cell, median of {report.rounds} interleaved rounds"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("hidden", "cell"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens/s", "to off/off", "lowest-highest", "paper", "TBT P50", "P95", "P99 ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in report.cells:
        table.add_row(
            str(cell.hidden), cell.cell, f"{cell.tokens_per_s:.0f}", f"{cell.ratio:.2f}",
            f"{cell.ratio_low:.2f}-{cell.ratio_high:.2f}", f"{PAPER[cell.cell]:.2f}", f"{cell.tbt_ms_p50:.2f}",
            f"{cell.tbt_ms_p95:.2f}", f"{cell.tbt_ms_p99:.2f}", end_section=cell.cell == "both",
        )  # fmt: skip
    console.print(table)
    for name, share in report.overlaps().items():
        console.print(f"{name}: attention and FFN workers computed at once in {share:.0%} of the busy time")
