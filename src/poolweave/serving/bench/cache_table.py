"""The cache study on the terminal: a row a curve, a column a cached share."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from poolweave.serving.bench.cache_study import CacheStudy

_SHOWN = 8  # surprises; the JSON has them all


def print_cache_study(study: CacheStudy, console: Console) -> None:
    """Mean times to first token, then whether they fall as more is cached."""
    table = Table(
        title="Mean time to first token, ms (tokens cached of each prompt)",
        title_justify="left", box=SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    for column in ("block", "batch", "tokens", "tier"):
        table.add_column(column, justify="right", no_wrap=True)
    curves = study.curves
    for number in range(max(len(points) for points in curves.values())):
        table.add_column("least cached" if number == 0 else "more" if number > 1 else "", justify="right", no_wrap=True)
    for (block, batch, tokens, tier), points in curves.items():
        cells = (f"{point.mean_s * 1e3:.1f} ({point.cached_tokens})" for point in points)
        table.add_row(str(block), str(batch), str(tokens), tier, *cells)
    console.print(table)
    surprises = study.surprises
    if not surprises:
        console.print("[green]✔[/green] the first token comes sooner the more is cached")
        return
    console.print(f"[red]✘[/red] not sooner with more cached, {len(surprises)} times (a busy machine? raise --repeats)")
    for line in surprises[:_SHOWN]:
        console.print(f"    {line}", markup=False, highlight=False)
