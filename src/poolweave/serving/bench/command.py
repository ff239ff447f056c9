"""What `poolweave bench transfer` and `bench cache` do: run the study under a progress bar, show it, keep it."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from poolweave.config import load
from poolweave.errors import ConfigError
from poolweave.serving.bench import cache_study, study
from poolweave.serving.bench.cache_chart import draw_cache_study
from poolweave.serving.bench.cache_table import print_cache_study
from poolweave.serving.bench.chart import draw
from poolweave.serving.bench.config import StudyConfig
from poolweave.serving.bench.table import print_study
from poolweave.serving.progress import measuring


def bench_transfer(config: Path | None, given: dict[str, Any], out: Path, *, as_json: bool) -> None:
    """`given` overrides the file. Tables go to stdout, or the JSON alone; progress to stderr. Raises ConfigError."""
    settings = StudyConfig() if config is None else load(config, StudyConfig)
    settings = dataclasses.replace(settings, **given)
    keep = _Keep(out, "transfer", as_json)
    with measuring("starting", study.num_points(settings)) as advance:
        found = study.run(settings, advance)
    keep.show(found.as_json(), lambda path: draw(found, path), lambda console: print_study(found, console))


def bench_cache(settings: cache_study.CacheStudyConfig, out: Path, *, as_json: bool) -> None:
    """The same for the cache study."""
    keep = _Keep(out, "cache", as_json)
    with measuring(f"loading {settings.model}", settings.num_points) as advance:
        found = cache_study.run(settings, advance)
    gc.collect()  # views of the pools, before the native module goes
    keep.show(
        found.as_json(), lambda path: draw_cache_study(found, path), lambda console: print_cache_study(found, console)
    )


class _Keep:
    """Where a study's files go; runs beside each other do not overwrite one another. Raises ConfigError at once when
    they could not be written."""

    def __init__(self, out: Path, name: str, as_json: bool) -> None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot write to {out}: {error.strerror}; choose another --out", setting="out"
            ) from error
        self._stem = out / time.strftime(f"{name}-%Y%m%d-%H%M%S")
        self._as_json = as_json

    def show(self, plain: dict[str, Any], draw: Callable[[Path], None], tell: Callable[[Console], None]) -> None:
        """JSON and PNG to their files; to stdout the tables, or the JSON alone."""
        written, picture = self._stem.with_suffix(".json"), self._stem.with_suffix(".png")
        text = json.dumps(plain, indent=2)
        written.write_text(text + "\n")
        draw(picture)
        console = Console(soft_wrap=False)
        if self._as_json:
            console.out(text, highlight=False)
            return
        tell(console)
        console.print(f"{picture}  {written}", highlight=False)
