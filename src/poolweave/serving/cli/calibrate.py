"""`poolweave calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from poolweave.serving.cli.json_option import Json
from poolweave.serving.cli.lists import numbers


def calibrate(
    model: Annotated[str | None, typer.Option(help="'smollm2' or a local Hugging Face directory.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file: the settings below, and more.")] = None,
    out: Annotated[Path, typer.Option(help="The calibration; its picture goes beside it.")] = Path("calibration.toml"),
    dtype: Annotated[str | None, typer.Option(help="Of weights and KV.")] = None,
    threads: Annotated[int | None, typer.Option(help="torch's threads, as an instance will have.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Prompt lengths, as 32,64,128.")] = None,
    ratios: Annotated[str | None, typer.Option(help="Cached ratios, as 0,0.5.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Rounds; the quickest counts.")] = None,
    tp: Annotated[int | None, typer.Option(help="Check a change to so many ranks; 1: none, 0: the fewest.")] = None,
    recorded: Annotated[
        list[Path] | None, typer.Option(help="CSV of requests as vLLM served them; may be given again.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the model's operators and the links between processes here, fit cost models, and say how far they are off
    on prompts that they have not seen. A door reads the file by `calibration` in [door.routing]."""
    import dataclasses

    from poolweave.config import load
    from poolweave.serving.calibration.command import Wanted
    from poolweave.serving.calibration.command import calibrate as run
    from poolweave.serving.calibration.config import CalibrateConfig

    given: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "num_threads": threads,
        "prompt_tokens": numbers(tokens, int, "tokens"),
        "cached_ratios": numbers(ratios, float, "ratios"),
        "repeats": repeats,
        "tp": tp,
    }
    settings = CalibrateConfig() if config is None else load(config, CalibrateConfig)
    settings = dataclasses.replace(settings, **{name: value for name, value in given.items() if value is not None})
    run(settings, Wanted(out=out, recorded=tuple(recorded or ()), as_json=as_json))
