"""Every benchmark runs on a small case and prints what it measured, one JSON object a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[2] / "benchmarks").glob("bench_*.py"))


@pytest.mark.slow
@pytest.mark.timeout(600)  # some start an engine of processes that import torch
@pytest.mark.parametrize("bench", BENCHMARKS, ids=lambda path: path.stem)
def test_smoke_run_prints_json_lines(bench: Path, tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(bench), "--smoke"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    points = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert points, done.stdout
    assert all(any(isinstance(value, (int, float)) for value in point.values()) for point in points)
