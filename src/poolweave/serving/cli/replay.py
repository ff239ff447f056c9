"""`poolweave replay`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from poolweave.serving.cli.json_option import Json, say


def replay(
    trace: Annotated[Path, typer.Argument(help="The recorded trace.", metavar="FILE")],
    kind: Annotated[str, typer.Option(help="mooncake, azure, sharegpt, loogle or react.")],
    model: Annotated[str, typer.Option(help="Its name in /v1/models.")] = "smollm2",
    url: Annotated[str, typer.Option(help="The door's address.")] = "http://127.0.0.1:8000",
    key: Annotated[str | None, typer.Option(help="API key.", envvar="POOLWEAVE_API_KEY")] = None,
    rate: Annotated[float | None, typer.Option(help="Poisson arrivals, so many a second; default: recorded.")] = None,
    speed: Annotated[float, typer.Option(help="Recorded arrivals, so many times as fast.")] = 1.0,
    requests: Annotated[int | None, typer.Option(help="Only the first ones.", min=1)] = None,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are cut.")] = 4096,
    max_answer_tokens: Annotated[int, typer.Option(help="Longer answers are cut.")] = 256,
    vocabulary: Annotated[int, typer.Option(help="Token ids stay below it.")] = 32_000,
    seed: Annotated[int, typer.Option(help="Of the Poisson arrivals.")] = 0,
    as_json: Json = False,
) -> None:
    """Ask a deployment what a trace's clients asked, and measure. Each session waits for its answers. Exit code 1 when
    a request was not answered, or when no server with the model is there."""
    from poolweave.errors import ConfigError
    from poolweave.serving.progress import progress_bar
    from poolweave.serving.replay import ReplayConfig, check_server
    from poolweave.serving.replay import replay as ask_all
    from poolweave.serving.simulator.trace_files import load_trace

    loaded = load_trace(kind, trace)
    loaded = loaded if requests is None else loaded.head(requests)
    if not loaded.requests:
        raise ConfigError(f"trace file {trace} holds no requests", setting="trace", value=str(trace))
    loaded = loaded if rate is None else loaded.at_rate(rate, seed)
    config = ReplayConfig(
        url=url, model=model, key=key, speed=speed, vocabulary=vocabulary, max_prompt_tokens=max_prompt_tokens,
        max_answer_tokens=max_answer_tokens,
    )  # fmt: skip
    check_server(config)
    with progress_bar() as progress:
        task = progress.add_task(f"{loaded.name}", total=len(loaded.requests))
        report = asyncio.run(ask_all(loaded, config, lambda: progress.advance(task)))
    summary = report.summary()
    if as_json:
        say(summary)
    else:
        width = max(len(name) for name in summary)
        for name, value in summary.items():
            typer.echo(f"{name:<{width}}  {value}")
    raise typer.Exit(int(not report.complete))
