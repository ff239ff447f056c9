"""`poolweave bench crosspool`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def crosspool(
    out: Annotated[Path, typer.Option(help="Folder for the JSON, the trace and the pictures.")] = Path("crosspool"),
    hidden: Annotated[str, typer.Option(help="Comma-separated hidden sizes.")] = "256,512,1024",
    layers: Annotated[int, typer.Option(help="Layers of each model.")] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds that count; one more warms up.")] = 5,
    tokens: Annotated[int, typer.Option(help="New tokens of each request.")] = 48,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
) -> None:
    """CrossPool's Table 3: control lowering and the pipeline, each off and on, over three small random models."""
    from rich.console import Console

    from poolweave.crosspool_engine.timeline import write_chrome_trace
    from poolweave.errors import ConfigError
    from poolweave.serving.ablation import AblationConfig, run_ablation
    from poolweave.serving.ablation.chart import draw_ablation, draw_timeline
    from poolweave.serving.ablation.report import as_json
    from poolweave.serving.ablation.table import print_ablation

    try:
        sizes = tuple(int(size) for size in hidden.split(","))
    except ValueError as error:
        raise ConfigError(f"hidden {hidden!r} is no list of numbers", setting="hidden", value=hidden) from error
    config = AblationConfig(hidden=sizes, layers=layers, rounds=rounds, tokens=tokens, dtype=dtype)
    out.mkdir(parents=True, exist_ok=True)
    report = run_ablation(config)
    (out / "ablation.json").write_text(as_json(report))
    write_chrome_trace(report.stages["both"], out / "timeline.trace.json")
    draw_ablation(report, out / "ablation.png")
    draw_timeline(report, out / "timeline.png")
    print_ablation(report, Console(width=max(100, Console().width)))
    typer.echo(f"Written to {out}: ablation.json, ablation.png, timeline.png, timeline.trace.json (ui.perfetto.dev)")
