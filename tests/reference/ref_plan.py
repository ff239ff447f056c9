"""A plan as a user gets it: a trace and models in a folder, and what `poolweave plan` makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from poolweave.serving.cli.app import app

_HEAD = """
split = "{split}"
dtype = "float32"
page = "64KiB"
[devices]
count = {devices}
memory = "{memory}"
bandwidth_gb_per_s = 10
[sampling]
percentile = 0.95
draws = 2000
"""


def write_trace(folder: Path, *, every_s: float) -> None:
    """80 requests in `folder`/trace.csv."""
    rng = np.random.default_rng(0)
    rows = [f"{t},{rng.integers(10, 60)},{rng.integers(5, 20)}" for t in rng.exponential(every_s, 80).cumsum()]
    (folder / "trace.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))


def write_plan(folder: Path, models: Sequence[str], *, split: str, devices: int, memory: str) -> Path:
    """-> the plan file of the models in folders of these names, each under load of the trace."""
    asked = [f'[[models]]\nname = "{n}"\nmodel = "{n}"\ntrace = "trace.csv"\ntoken_s = 0.02\n' for n in models]
    wanted, plan = folder / "plan.toml", folder / "plan.json"
    wanted.write_text(_HEAD.format(split=split, devices=devices, memory=memory) + "".join(asked))
    result = CliRunner().invoke(app, ["plan", str(wanted), "--out", str(plan)])
    assert result.exit_code == 0, result.output
    return plan
