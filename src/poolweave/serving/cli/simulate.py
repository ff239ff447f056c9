"""`poolweave simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def simulate(
    trace: Annotated[Path, typer.Argument(help="The recorded trace, plain or .xz.", metavar="FILE")],
    kind: Annotated[str, typer.Option(help="mooncake, azure, sharegpt, loogle or react.")],
    instances: Annotated[str, typer.Option(help="How many of each role.")] = "prefill=3,decode=1",
    policies: Annotated[
        str, typer.Option(help="Of prompt_tree, session, least_load, round_robin, power_of_two.")
    ] = "prompt_tree,session,least_load",
    flow: Annotated[str, typer.Option(help="pd-basic or pd-caching-1, -2 or -3.")] = "pd-caching-3",
    rate: Annotated[float | None, typer.Option(help="Poisson arrivals, so many a second; default: recorded.")] = None,
    requests: Annotated[int | None, typer.Option(help="Only the first ones.", min=1)] = None,
    cache_tokens: Annotated[int, typer.Option(help="Room of an instance for historical KV.")] = 140_000,
    kv_tokens: Annotated[int, typer.Option(help="Its room for running requests' KV.")] = 140_000,
    seed: Annotated[int, typer.Option(help="Of the arrivals and of what is drawn by lot.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the comparison there, as PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Compare routing policies on a recorded trace, under a virtual clock: no model runs. Each instance takes the time
    of Llama-2-13B on two H800, computed from first principles."""
    from rich.console import Console
    from rich.progress import Progress

    from poolweave.serving.simulation_comparison import Comparison, Question

    question = Question(
        instances=instances, policies=policies, flow=flow, cache_tokens=cache_tokens, kv_tokens=kv_tokens, seed=seed
    )
    loaded = question.trace(kind, trace, requests=requests, rate=rate)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(loaded.name, total=len(loaded.requests) * len(question.names))
        comparison = Comparison.of(question, loaded, lambda count: progress.advance(task, count))
    if plot is not None:
        from poolweave.serving.simulation_chart import draw_simulation

        plot.parent.mkdir(parents=True, exist_ok=True)
        draw_simulation(comparison, plot)
    if as_json:
        typer.echo(json.dumps(comparison.as_dict()))
        return
    from poolweave.serving.simulation_table import print_simulation

    print_simulation(comparison, Console())
    if plot is not None:
        typer.echo(f"Written: {plot}")
