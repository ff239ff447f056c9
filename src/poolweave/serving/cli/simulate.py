"""`poolweave simulate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poolweave.serving.cli.json_option import Json, say
from poolweave.serving.cli.lists import numbers

if TYPE_CHECKING:
    from poolweave.serving.simulator.comparison import Comparison
    from poolweave.serving.simulator.question import Question
    from poolweave.serving.simulator.trace_choice import TraceChoice, Workload

_Text = str | None


def simulate(
    trace: Annotated[
        Path | None, typer.Argument(help="The recorded trace, plain or .xz; none for made-up kinds.", metavar="FILE")
    ] = None,
    kind: Annotated[
        _Text, typer.Option(help="mooncake, azure, sharegpt, loogle, react; made up: shared, conversations.")
    ] = None,
    figure: Annotated[
        _Text, typer.Option(help="MemServe's: 15 (policies over shares of LooGLE) or 8 (flows over rates of ShareGPT).")
    ] = None,
    instances: Annotated[_Text, typer.Option(help="How many of each role. Default: prefill=3,decode=1.")] = None,
    policies: Annotated[
        _Text,
        typer.Option(help="Of prompt_tree, session, least_load, round_robin, power_of_two. Default: the first three."),
    ] = None,
    flow: Annotated[
        _Text,
        typer.Option(help="Of pd-basic, pd-caching-1, -2, -3, colocated, colocated-caching. Default: pd-caching-3."),
    ] = None,
    rate: Annotated[_Text, typer.Option(help="Poisson arrivals, so many a second, as 4 or 1,2,4.")] = None,
    share: Annotated[_Text, typer.Option(help="Of loogle and shared: what prompts have in common, as 0,0.5,1.")] = None,
    copies: Annotated[int | None, typer.Option(help="Of loogle: documents of each length.", min=1)] = None,
    requests: Annotated[int | None, typer.Option(help="Only the first ones.", min=1)] = None,
    cache_tokens: Annotated[int, typer.Option(help="Room of an instance for historical KV.")] = 140_000,
    kv_tokens: Annotated[int, typer.Option(help="Its room for running requests' KV.")] = 140_000,
    seed: Annotated[int, typer.Option(help="Of the arrivals and of what is drawn by lot.")] = 0,
    device: Annotated[
        Path | None, typer.Option(help="Calibration whose times instances take; default: Llama-2-13B on two H800.")
    ] = None,
    moves_kv: Annotated[
        bool, typer.Option("--moves-kv", help="Fetch prefixes from other instances where that is faster.")
    ] = False,
    deaths: Annotated[str, typer.Option(help="Who is killed when, as 4:prefill-1,30:decode-0.")] = "",
    restart_s: Annotated[float, typer.Option(help="So long after its death an instance is back, empty.")] = 30.0,
    stay_dead: Annotated[bool, typer.Option("--stay-dead", help="It is not back.")] = False,
    loss: Annotated[float, typer.Option(help="Share of heartbeats and eviction events that are lost.")] = 0.0,
    late_s: Annotated[float, typer.Option(help="The others come up to so much later.")] = 0.0,
    pauses: Annotated[str, typer.Option(help="When the coordinator stands still for how long, as 10:5.")] = "",
    plot: Annotated[Path | None, typer.Option(help="Draw the comparison there, as PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Compare routing policies or flows on a trace, under a virtual clock: no model runs. Each instance takes the time
    that `poolweave calibrate` measured, or that Llama-2-13B takes on two H800, computed from first principles."""
    from poolweave.serving.simulator.faults import Faults, deaths_of, pauses_of
    from poolweave.serving.simulator.paper_figures import paper_figure

    faults = Faults(
        deaths=deaths_of(deaths), restart_s=None if stay_dead else restart_s, message_loss=loss, message_delay_s=late_s,
        coordinator_pauses=pauses_of(pauses),
    )  # fmt: skip
    asked = paper_figure(figure)
    question = asked.question_with(
        cache_tokens=cache_tokens, kv_tokens=kv_tokens, seed=seed, device=device, faults=faults, moves_kv=moves_kv,
        **_given(instances=instances, policies=policies, flows=flow),
    )  # fmt: skip
    choice = asked.choice_with(
        path=trace, requests=requests, seed=seed,
        **_given(kind=kind, rates=numbers(rate, float, "rate"), shares=numbers(share, float, "share"), copies=copies),
    )  # fmt: skip
    comparison = _run(question, choice)
    _tell(comparison, asked.says, plot, as_json=as_json)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _run(question: Question, choice: TraceChoice) -> Comparison:
    from poolweave.serving.progress import progress_bar
    from poolweave.serving.simulator.comparison import Comparison

    with progress_bar() as progress:

        def begun(workload: Workload, total: int) -> Callable[[int], None]:
            task = progress.add_task(workload.trace.name, total=total)
            return lambda count: progress.advance(task, count)

        return Comparison.of(question, choice, begun)


def _tell(comparison: Comparison, says: str, plot: Path | None, *, as_json: bool) -> None:
    from rich.console import Console

    if plot is not None:
        from poolweave.serving.result_file import out_folder
        from poolweave.serving.simulator.chart import draw_simulation

        out_folder(str(plot.parent))
        draw_simulation(comparison, plot)
    if as_json:
        say(comparison.as_dict())
        return
    from poolweave.serving.simulator.table import print_simulation

    print_simulation(comparison, Console())
    if says:
        typer.echo(f"the paper: {says}")
    if plot is not None:
        typer.echo(f"Written: {plot}")
