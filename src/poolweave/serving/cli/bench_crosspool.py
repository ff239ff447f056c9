"""`poolweave bench crosspool`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from poolweave.serving.cli.json_option import Json
from poolweave.serving.cli.lists import numbers


def crosspool(
    out: Annotated[Path, typer.Option(help="Folder for the JSON, the trace and the pictures.")] = Path("crosspool"),
    hidden: Annotated[str, typer.Option(help="Comma-separated hidden sizes.")] = "256,512,1024",
    layers: Annotated[int, typer.Option(help="Layers of each model.")] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds that count; one more warms up.")] = 5,
    tokens: Annotated[int, typer.Option(help="New tokens of each request.")] = 48,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    as_json: Json = False,
) -> None:
    """CrossPool's Table 3: control lowering and the pipeline, each off and on, over three small random models."""
    from rich.console import Console

    from poolweave.crosspool_engine.timeline import write_chrome_trace
    from poolweave.serving.ablation import AblationConfig, run_ablation
    from poolweave.serving.ablation.chart import draw_ablation, draw_timeline
    from poolweave.serving.ablation.report import report_json
    from poolweave.serving.ablation.table import print_ablation
    from poolweave.serving.result_file import out_folder

    sizes = tuple(int(size) for size in numbers(hidden, int, "hidden") or ())
    config = AblationConfig(hidden=sizes, layers=layers, rounds=rounds, tokens=tokens, dtype=dtype)
    out_folder(str(out))
    report = run_ablation(config)
    (out / "ablation.json").write_text(report_json(report))
    write_chrome_trace(report.stages["both"], out / "timeline.trace.json")
    draw_ablation(report, out / "ablation.png")
    draw_timeline(report, out / "timeline.png")
    if as_json:
        typer.echo(report_json(report))
        return
    print_ablation(report, Console(width=max(100, Console().width)))
    typer.echo(f"Written to {out}: ablation.json, ablation.png, timeline.png, timeline.trace.json (ui.perfetto.dev)")
