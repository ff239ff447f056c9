"""`poolweave bench`: what things cost on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from poolweave.serving.cli.bench_crosspool import crosspool

bench = typer.Typer(help="Measure what things cost on this machine.", no_args_is_help=True)


@bench.callback()
def _group() -> None:
    """Measure what things cost on this machine."""


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
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
) -> None:
    """Layouts, granularities and connections of KV transfers: MemServe's Figures 11 and 12 on this machine."""
    from poolweave.serving.bench.command import bench_transfer

    given: dict[str, Any] = {
        "studies": _words(studies),
        "transports": _words(transports),
        "tokens": _numbers(tokens, int, "tokens"),
        "connections": _numbers(connections, int, "connections"),
        "loads": _numbers(loads, float, "loads"),
        "repeats": repeats,
        "requests": requests,
        "layer_ms": layer_ms,
        "peers": peers,
    }
    bench_transfer(config, {name: value for name, value in given.items() if value is not None}, out, as_json=json)


def _words(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str | None, kind: type[int] | type[float], name: str) -> tuple[float, ...] | None:
    words = _words(text)
    try:
        return None if words is None else tuple(kind(word) for word in words)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of numbers like 1,2", param_hint=f"--{name}") from error
