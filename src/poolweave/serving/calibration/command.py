"""What `poolweave calibrate` does: measure under a progress bar, fit, show, keep."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from poolweave.config import to_mapping
from poolweave.errors import ConfigError
from poolweave.serving.calibration.config import CalibrateConfig
from poolweave.serving.calibration.fit import Fitted
from poolweave.serving.calibration.recorded import RecordedErrors, recorded_errors
from poolweave.serving.progress import measuring


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Where results go: `out` the calibration, beside it the picture; `recorded` is judged too."""

    out: Path
    recorded: tuple[Path, ...] = ()
    as_json: bool = False


def calibrate(config: CalibrateConfig, wanted: Wanted) -> None:
    """Tables go to stdout, or the JSON alone; progress to stderr. Raises ConfigError, ModelNotFound and their like."""
    if wanted.out.suffix != ".toml":
        raise ConfigError(f"out={wanted.out} must end in .toml; the picture goes beside it as .png", setting="out")
    judged = [recorded_errors(path) for path in wanted.recorded]
    fitted = _measure(config)
    fitted.calibration.save(wanted.out)
    gc.collect()  # views of the pools, before the native module goes
    from poolweave.serving.calibration.chart import draw_calibration
    from poolweave.serving.calibration.table import print_calibration

    picture = wanted.out.with_suffix(".png")
    draw_calibration(fitted, picture)
    console = Console(soft_wrap=False)
    if wanted.as_json:
        console.out(json.dumps(_plain(fitted, judged), indent=2), highlight=False)
        return
    print_calibration(fitted, judged, console)
    console.print(f"{wanted.out}  {picture}", highlight=False)


def _measure(config: CalibrateConfig) -> Fitted:
    from poolweave.serving.calibration.fit import fit, require_points
    from poolweave.serving.calibration.measurement import measure, points
    from poolweave.serving.engine import load_model

    with measuring(f"loading {config.model}", config.num_points) as advance:
        model = load_model(config.model, config.dtype)
        require_points(points(model, config), config)
        taken = measure(model, config, advance)
    return fit(model, config, taken)


def _plain(fitted: Fitted, judged: Sequence[RecordedErrors]) -> dict[str, Any]:
    return {
        "calibration": to_mapping(fitted.calibration),
        "points": [asdict(point) for point in fitted.points],
        "recorded": [asdict(one) for one in judged],
    }
