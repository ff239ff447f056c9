"""`poolweave bench`: what things cost on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from poolweave.serving.cli.bench_cache import cache
from poolweave.serving.cli.bench_crosspool import crosspool
from poolweave.serving.cli.json_option import Json
from poolweave.serving.cli.lists import numbers, words

bench = typer.Typer(help="Measure what things cost on this machine.", no_args_is_help=True)


@bench.callback()
def _group() -> None:
    """Measure what things cost on this machine."""


bench.command()(cache)
bench.command()(crosspool)


@bench.command()
def transfer(
    config: Annotated[Path | None, typer.Option(help="TOML file: the settings below, and the model.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the JSON file.")] = Path("poolweave-bench"),
    studies: Annotated[str | None, typer.Option(help="Of layout, granularity, connections.")] = None,
    transports: Annotated[str | None, typer.Option(help="Comma-separated, as shm,tcp.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Prompt sizes of the layout study.")] = None,
    connections: Annotated[str | None, typer.Option(help="Data connections (tcp), copying threads (shm).")] = None,
    loads: Annotated[str | None, typer.Option(help="Shares of what one instance can compute.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Transfers a point.")] = None,
    requests: Annotated[int | None, typer.Option(help="Prompts a load.")] = None,
    layer_ms: Annotated[float | None, typer.Option(help="How long a layer is computed.")] = None,
    peers: Annotated[int | None, typer.Option(help="Connected to see what one costs.")] = None,
    as_json: Json = False,
) -> None:
    """Layouts, granularities and connections of KV transfers: MemServe's Figures 11 and 12 on this machine."""
    from poolweave.serving.bench.command import bench_transfer

    given: dict[str, Any] = {
        "studies": words(studies),
        "transports": words(transports),
        "tokens": numbers(tokens, int, "tokens"),
        "connections": numbers(connections, int, "connections"),
        "loads": numbers(loads, float, "loads"),
        "repeats": repeats,
        "requests": requests,
        "layer_ms": layer_ms,
        "peers": peers,
    }
    bench_transfer(config, {name: value for name, value in given.items() if value is not None}, out, as_json=as_json)
