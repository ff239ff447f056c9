"""`poolweave flows`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from poolweave.serving.cli.json_option import Json


def flows(
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings below, and more.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for flows.png and flows.json.")] = None,
    sessions: Annotated[Path | None, typer.Option(help="Sessions as .jsonl or .jsonl.xz; default: built in.")] = None,
    only: Annotated[str | None, typer.Option("--flows", help="Comma-separated names; default: all.")] = None,
    model: Annotated[str | None, typer.Option(help="'smollm2' or a local Hugging Face directory.")] = None,
    turns: Annotated[int | None, typer.Option(help="At most this many turns a session.")] = None,
    max_sessions: Annotated[int | None, typer.Option(help="At most this many sessions.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer, at most.")] = None,
    transport: Annotated[str | None, typer.Option(help="How KV travels: shm or tcp.")] = None,
    as_json: Json = False,
) -> None:
    """Run multi-turn sessions through every flow on a prefill and a decode process, and compare."""
    from poolweave.config import load
    from poolweave.serving.flow_comparison.run import FlowsConfig, run_flows

    given: dict[str, Any] = {
        "out": None if out is None else str(out),
        "sessions": None if sessions is None else str(sessions),
        "flows": None if only is None else tuple(name.strip() for name in only.split(",")),
        "model": model,
        "turns": turns,
        "max_sessions": max_sessions,
        "max_new_tokens": max_new_tokens,
        "transport": transport,
    }
    settings = FlowsConfig() if config is None else load(config, FlowsConfig)
    settings = dataclasses.replace(settings, **{name: value for name, value in given.items() if value is not None})
    raise typer.Exit(run_flows(settings, as_json=as_json))
