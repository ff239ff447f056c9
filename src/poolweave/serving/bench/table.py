"""The transfer study as tables on the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from poolweave.serving.bench.points import Study


def print_study(study: Study, console: Console) -> None:
    """One table a part of the study that was run."""
    if study.layout:
        console.print(_layout(study))
    if study.granularity:
        console.print(_granularity(study))
    if study.connections:
        console.print(_connections(study))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
    return table


def _layout(study: Study) -> Table:
    table = _table(
        "Discrete against aggregated blocks", "transport", "blocks", "conn.", "tokens", "MiB", "calls", "ms", "worst",
        "GB/s", "gain",
    )  # fmt: skip
    for point in study.layout:
        gain = f"{point.gain:.2f}x" if point.gain is not None else ""
        table.add_row(
            point.transport, point.blocks, str(point.connections), str(point.tokens), f"{point.nbytes / 2**20:.1f}",
            str(point.calls), _ms(point.median_s), _ms(point.worst_s), f"{point.gb_per_s:.2f}", gain,
        )  # fmt: skip
    return table


def _granularity(study: Study) -> Table:
    table = _table(
        f"From arrival to KV at the peer: {study.config.prompt_tokens} tokens, {study.config.layer_ms:g} ms a layer",
        "transport", "granularity", "load", "steps", "calls", "mean ms", "P99", "exposed", "early",
    )  # fmt: skip
    for point in study.granularity:
        table.add_row(
            point.transport, point.granularity, f"{point.load:g}", f"{point.steps:.0f}", f"{point.calls:.0f}",
            _ms(point.mean_s), _ms(point.p99_s), _ms(point.exposed_s), f"{point.early_share:.0%}",
        )  # fmt: skip
    return table


def _connections(study: Study) -> Table:
    table = _table("What one connected peer costs", "transport", "direction", "peers", "KiB", "descriptors", "threads")
    for point in study.connections:
        table.add_row(
            point.transport, point.direction, str(point.peers), f"{point.kib_each:.1f}",
            f"{point.descriptors_each:.1f}", f"{point.threads_each:.1f}",
        )  # fmt: skip
    return table


def _ms(seconds: float) -> str:
    """Milliseconds, three digits of them, but no fewer than whole ones."""
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:#.3g}"
