"""`poolweave plan`: from a TOML file to a plan file, an explanation and a picture; refusals are numbers, not traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy", reason="needs the plan extra")
pytest.importorskip("matplotlib", reason="needs the demo extra")

from typer.testing import CliRunner

from poolweave.crosspool_engine.planner import load_plan
from poolweave.errors import ConfigError, ModelNotFound, PlanInfeasible
from poolweave.serving.cli.app import app

CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip
FILE = """
split = "expert"
page = "64KiB"
[devices]
count = 3
memory = "16MiB"
bandwidth_gb_per_s = 10
[sampling]
percentile = 0.95
draws = 2000
[[models]]
name = "a"
model = "model"
trace = "trace.csv"
rate_per_s = 0.5
token_s = 0.02
[[models]]
name = "b"
model = "model"
trace = "trace.csv"
token_s = 0.02
arrivals = "trace"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    rng = np.random.default_rng(0)
    rows = [f"{t},{rng.integers(10, 200)},{rng.integers(5, 50)}" for t in rng.exponential(2.0, 80).cumsum()]
    (tmp_path / "trace.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
    (tmp_path / "plan.toml").write_text(FILE)
    return tmp_path


def test_a_plan_is_written_explained_and_drawn(folder: Path) -> None:
    out = folder / "deep" / "plan.json"
    result = CliRunner().invoke(app, ["plan", str(folder / "plan.toml"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    plan = load_plan(out)
    assert [model.name for model in plan.models] == ["a", "b"]
    assert (plan.split, plan.page_bytes, plan.percentile) == ("expert", 64 << 10, 0.95)
    assert "Devices: KV W W" in result.output
    assert "by Little's law" in result.output
    assert "KiB" in result.output or "MiB" in result.output, "the models are small"
    assert "0.00" not in result.output
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("old", "new", "error", "says"),
    [
        ('count = 3\nmemory = "16MiB"', 'count = 2\nmemory = "8MiB"', PlanInfeasible, "FFN weights need 12,6"),
        ("rate_per_s = 0.5", "rate_per_s = 500", PlanInfeasible, "bytes of KV"),
        ("count = 3", "count = 1", ConfigError, "at least 2 devices, got 1"),
        ("token_s = 0.02\n[[", "[[", ConfigError, "has no service times: pass token_s"),
        ('model = "model"', 'model = "nowhere"', ModelNotFound, "nowhere"),
        ("draws = 2000", "drawz = 2000", ConfigError, "did you mean 'draws'"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_its_numbers_and_writes_nothing(
    folder: Path, old: str, new: str, error: type[Exception], says: str
) -> None:
    assert old in FILE
    (folder / "plan.toml").write_text(FILE.replace(old, new, 1))
    result = CliRunner().invoke(app, ["plan", str(folder / "plan.toml"), "--out", str(folder / "plan.json")])
    assert isinstance(result.exception, error)
    assert says in str(result.exception)
    assert not (folder / "plan.json").exists()
    assert not (folder / "plan.png").exists()
