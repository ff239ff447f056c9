"""What `poolweave bench transfer` does: run the study under a progress bar, show it, keep it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from poolweave.config import load
from poolweave.errors import ConfigError
from poolweave.serving.bench.chart import draw
from poolweave.serving.bench.config import StudyConfig
from poolweave.serving.bench.points import Study
from poolweave.serving.bench.study import file_stem, num_points, run
from poolweave.serving.bench.table import print_study


def bench_transfer(config: Path | None, given: dict[str, Any], out: Path, *, as_json: bool) -> None:
    """`given` overrides the file. Tables go to stdout, or the JSON alone; progress to stderr. Raises ConfigError."""
    settings = StudyConfig() if config is None else load(config, StudyConfig)
    settings = dataclasses.replace(settings, **given)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}; choose another --out", setting="out") from error
    study = _run(settings)
    stem = out / file_stem()
    text = json.dumps(study.as_json(), indent=2)
    stem.with_suffix(".json").write_text(text + "\n")
    draw(study, stem.with_suffix(".png"))
    console = Console(soft_wrap=False)
    if as_json:
        console.out(text, highlight=False)
        return
    print_study(study, console)
    console.print(f"{stem.with_suffix('.png')}  {stem.with_suffix('.json')}", highlight=False)


def _run(settings: StudyConfig) -> Study:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=num_points(settings))
        return run(settings, lambda what: progress.update(task, advance=1, description=what))
