"""What the index's benchmarks share: the prompts, rounds of ours and peers in turn, and points as JSON lines.

10,000 prompts of 4,096 tokens, block 16: 8 system prompts, 500 conversations, 20 variants each, 704,512 blocks.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TOKENS, BLOCK = 4096, 16
VARIANTS = 20

Rounds = dict[str, list[dict[str, float]]]


def prompts(conversations: int = 500, seed: int = 0) -> Any:
    """int32 [conversations * 20, 4096] in random order."""
    draw = np.random.default_rng(seed)
    system = draw.integers(0, 128_000, (8, 1024), dtype=np.int32)
    made = np.empty((conversations * VARIANTS, TOKENS), np.int32)
    for i in range(conversations):
        rows = slice(VARIANTS * i, VARIANTS * (i + 1))
        made[rows, :1024] = system[i % 8]
        made[rows, 1024:3072] = draw.integers(0, 128_000, 2048)
        made[rows, 3072:] = draw.integers(0, 128_000, (VARIANTS, 1024))
    draw.shuffle(made, axis=0)
    return made


def rounds_in_turn(script: str, pythons: Mapping[str, str], arguments: Sequence[str], rounds: int) -> Rounds:
    """Each library in processes of its own, `script --run NAME`, which print one JSON object of metrics."""
    results: Rounds = {name: [] for name in pythons}
    for _ in range(rounds):
        for name, python in pythons.items():
            command = [python, script, "--run", name, *arguments]
            results[name].append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    return results


def report(results: Rounds, peer: str) -> None:
    """One line a metric: medians, and the median ratio of ours to `peer`'s of the same round."""
    for metric in results["ours"][0]:
        point: dict[str, Any] = {"metric": metric}
        for name, measured in results.items():
            if metric in measured[0]:
                point[name] = round(statistics.median(one[metric] for one in measured), 3)
        if peer in point:
            pairs = zip(results["ours"], results[peer], strict=True)
            point["ratio"] = round(statistics.median(ours[metric] / theirs[metric] for ours, theirs in pairs), 3)
        print(json.dumps(point))


def pythons_of(peers: Path | None, peer: str, venv: str) -> dict[str, str]:
    """Who takes part: ours, and `peer` with the Python of its own where the folder of peers is given."""
    return {"ours": sys.executable} | ({peer: str(peers / venv / "bin/python")} if peers else {})
