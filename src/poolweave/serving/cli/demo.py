"""`poolweave demo`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from poolweave.serving.cli.json_option import Json


def demo(
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings below, and more.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for demo.png and demo.json.")] = None,
    turns: Annotated[int | None, typer.Option(help="At most this many turns a session.")] = None,
    max_sessions: Annotated[int | None, typer.Option(help="At most this many sessions a model.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer, at most.")] = None,
    transport: Annotated[str | None, typer.Option(help="How KV travels: shm or tcp.")] = None,
    as_json: Json = False,
) -> None:
    """Run PD caching and CrossPool together over three cold MoE models, and check every token of it."""
    from poolweave.config import load
    from poolweave.serving.demo.config import DemoConfig
    from poolweave.serving.demo.run import run_demo

    given: dict[str, Any] = {
        "out": None if out is None else str(out),
        "turns": turns,
        "max_sessions": max_sessions,
        "max_new_tokens": max_new_tokens,
        "transport": transport,
    }
    settings = DemoConfig() if config is None else load(config, DemoConfig)
    settings = dataclasses.replace(settings, **{name: value for name, value in given.items() if value is not None})
    raise typer.Exit(run_demo(settings, as_json=as_json))
