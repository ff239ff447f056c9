"""`poolweave bench transfer` as a user runs it, on KV small enough for a test, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from poolweave.errors import ConfigError, PeerLost, PoolweaveError
from poolweave.serving.bench.command import bench_transfer
from poolweave.serving.bench.config import ModelShape, StudyConfig
from poolweave.serving.bench.granularity_study import MODES
from poolweave.serving.bench.layout_study import spec_of
from poolweave.serving.bench.peer import Peer
from poolweave.serving.bench.study import num_points

pytestmark = pytest.mark.multiproc

SMALL = "tokens = [16, 48]\nprompt_tokens = 32\n[model]\nlayers = 4\nkv_heads = 2\nhead_dim = 8\n"


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = tmp_path / "small.toml"
    settings.write_text(SMALL)
    code = "from poolweave.serving.cli import main; main()"
    command = [sys.executable, "-c", code, "bench", "transfer", "--config", str(settings), "--out", str(tmp_path)]
    return subprocess.run([*command, *arguments], capture_output=True, text=True)


def test_the_command_measures_shows_and_keeps(tmp_path: Path) -> None:
    few = ("--requests", "2", "--peers", "2", "--repeats", "1", "--loads", "0.8", "--layer-ms", "0.5")
    result = run(tmp_path, *few, "--connections", "1", "--transports", "shm", "--json")
    assert result.returncode == 0, result.stderr
    study: dict[str, Any] = json.loads(result.stdout)
    layout = {(p["transport"], p["blocks"], p["tokens"]): p for p in study["layout"]}
    assert len(layout) == 4
    for tokens in (16, 48):
        discrete, aggregated = (layout["shm", blocks, tokens] for blocks in ("discrete", "aggregated"))
        assert discrete["nbytes"] == aggregated["nbytes"] == tokens * 4 * 2 * 2 * 8 * 2
        assert (discrete["calls"], aggregated["calls"]) == (tokens // 16 * 8, tokens // 16)
        assert min(discrete["median_s"], aggregated["gb_per_s"], aggregated["gain"]) > 0
        assert discrete["gain"] is None
    steps = {(p["transport"], p["granularity"]): p["steps"] for p in study["granularity"]}
    assert {name for _, name in steps} == {mode.name for mode in MODES}
    assert (steps["shm", "by-req"], steps["shm", "by-layer"]) == (1, 4)
    calls = {p["granularity"]: p["calls"] for p in study["granularity"]}
    assert [calls[name] for name in ("by-req", "by-layer", "by-req-agg", "by-layer-agg")] == [16, 16, 1, 8]
    costs = {(p["transport"], p["direction"]): p for p in study["connections"]}
    assert all(cost["descriptors_each"] >= 1 for cost in costs.values())
    (picture,) = tmp_path.glob("transfer-*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    (kept,) = tmp_path.glob("transfer-*.json")
    assert json.loads(kept.read_text()) == study


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [(("--transports", "rdma"), 1, "'rdma' is not one of"), (("--tokens", "many"), 2, "no list of numbers")],
)
def test_wrong_settings_are_one_line(tmp_path: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    result = run(tmp_path, *arguments)
    assert (result.returncode, "Traceback" in result.stderr) == (code, False), result.stderr
    assert said in " ".join(result.stderr.replace("│", " ").split())


def test_files_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        bench_transfer(Path("/nowhere.toml"), {}, Path("."), as_json=True)
    with pytest.raises(ConfigError, match="choose another --out"):
        bench_transfer(None, {}, Path("/proc/nowhere"), as_json=True)


def test_settings_out_of_range_are_refused() -> None:
    for bad in ({"studies": ()}, {"studies": ("size",)}, {"loads": (0.0,)}, {"connections": (65,)}, {"layer_ms": -1.0}):
        with pytest.raises(ConfigError):
            StudyConfig(**bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_heads"):
        StudyConfig(model=ModelShape(kv_heads=0))
    assert num_points(StudyConfig(studies=("layout",))) == 2 * 2 * 2 * 3


def test_the_other_process_reports_errors_and_its_death() -> None:
    config = StudyConfig(model=ModelShape(layers=1, kv_heads=1, head_dim=8))
    with Peer() as peer:
        spec = spec_of(config, "aggregated", "shm", 1, 4)
        ((instance, _),) = peer.open(spec)
        with pytest.raises(PoolweaveError, match="at the study's other process: ConfigError"):
            peer.send_to([(instance, "nowhere://")])
        peer._child.kill()
        with pytest.raises(PeerLost, match="ended with code -9"):
            peer.open(spec)
