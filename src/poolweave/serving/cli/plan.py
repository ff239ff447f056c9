"""`poolweave plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from poolweave.serving.cli.json_option import Json


def plan(
    file: Annotated[Path, typer.Argument(help="TOML: \\[devices], [\\[models]] with model and trace each.")],
    out: Annotated[Path, typer.Option(help="The plan file, as JSON.")] = Path("plan.json"),
    plot: Annotated[Path | None, typer.Option(help="The picture; default: beside the plan file, as .png.")] = None,
    as_json: Json = False,
) -> None:
    """Plan the KV pool and the weights pool of several cold models from traces of their requests."""
    from poolweave.crosspool_engine.planner import explain, make_plan, save_plan
    from poolweave.serving.plan.chart import draw_plan
    from poolweave.serving.plan.file import read_plan_request
    from poolweave.serving.result_file import out_folder

    request = read_plan_request(file)
    made = make_plan(request)
    picture = out.with_suffix(".png") if plot is None else plot
    for target in (out, picture):
        out_folder(str(target.parent))
    draw_plan(request, made, picture)
    save_plan(made, out)
    if as_json:
        typer.echo(out.read_text(encoding="utf-8"), nl=False)
        return
    typer.echo(explain(made), nl=False)
    typer.echo(f"Written: {out}, {picture}")
