"""`poolweave bench cache`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from poolweave.serving.cli.json_option import Json
from poolweave.serving.cli.lists import numbers, words


def cache(
    config: Annotated[Path | None, typer.Option(help="TOML file: the settings below, and more.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the JSON file.")] = Path("poolweave-bench"),
    model: Annotated[str | None, typer.Option(help="'smollm2' or a local Hugging Face directory.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Prompt lengths, as 96,224.")] = None,
    ratios: Annotated[str | None, typer.Option(help="Cached ratios, as 0,0.5.")] = None,
    batches: Annotated[str | None, typer.Option(help="Prompts that arrive together.")] = None,
    blocks: Annotated[str | None, typer.Option(help="Block sizes in tokens.")] = None,
    tiers: Annotated[str | None, typer.Option(help="Where cached blocks lie: hbm,dram.")] = None,
    threads: Annotated[int | None, typer.Option(help="torch's threads.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Runs of each; the median counts.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Long prompts, more ratios, batches and blocks.")] = False,
    as_json: Json = False,
) -> None:
    """Time to first token over cached ratio, prompt length, batch, block size and tier: MemServe's Figure 13 on this
    machine, on the real engine. Under a minute on two cores unless asked for more."""
    import dataclasses

    from poolweave.config import load
    from poolweave.errors import ConfigError
    from poolweave.serving.bench.cache_study import CacheStudyConfig
    from poolweave.serving.bench.command import bench_cache

    if full and config is not None:
        raise ConfigError("--full and --config both say what is measured; give one of them", setting="full")
    given: dict[str, Any] = {
        "model": model,
        "tokens": numbers(tokens, int, "tokens"),
        "ratios": numbers(ratios, float, "ratios"),
        "batches": numbers(batches, int, "batches"),
        "block_tokens": numbers(blocks, int, "blocks"),
        "tiers": words(tiers),
        "num_threads": threads,
        "repeats": repeats,
    }
    settings = CacheStudyConfig.full() if full else CacheStudyConfig()
    settings = settings if config is None else load(config, CacheStudyConfig)
    settings = dataclasses.replace(settings, **{name: value for name, value in given.items() if value is not None})
    bench_cache(settings, out, as_json=as_json)
