"""`poolweave calibrate` on a small random model, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from poolweave.errors import PoolweaveError
from poolweave.scheduler.operators import Parallelism
from poolweave.serving.calibration import load_calibration
from poolweave.serving.cli.app import app

pytestmark = [pytest.mark.multiproc, pytest.mark.engine]


@pytest.mark.timeout(600)
def test_a_small_model_is_measured_fitted_and_written(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from ref_transformers import save_random_model

    out = tmp_path / "here" / "llama.toml"
    config = tmp_path / "settings.toml"
    config.write_text('sequences = [1, 2]\ncontext_tokens = [16, 48]\ntransports = ["shm"]\nrepeats = 9\n')
    options = [
        "--model", str(save_random_model("llama", tmp_path / "model")), "--config", str(config), "--out", str(out),
        "--tokens", "16,32,48,80,112", "--ratios", "0,0.4,0.7", "--repeats", "1", "--json",
    ]  # fmt: skip
    result = CliRunner().invoke(app, ["calibrate", *options])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    found = load_calibration(out)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert {"q_proj", "o_proj", "gate_proj", "down_proj"} < set(found.operators.gemms)
    assert set(found.operators.others) == {"ffn", "head", "norm", "rest"}
    assert set(found.links) == {"shm"}
    reduce, hop = found.operators.collectives["all_reduce"], found.operators.hops["stage"]
    assert (reduce.count, reduce.bytes_per_token) == (2 * 2, 4 * 64), "after each attention and each FFN"
    assert reduce.bytes_per_s > 0 < hop.bytes_per_s
    alone = found.operators.computed().model(Parallelism(tp=2, pp=2)).exact_s(112, 0)
    assert found.operators.model(Parallelism(tp=2, pp=2)).exact_s(112, 0) > alone
    assert found.operators.model().exact_s(112, 0) == found.operators.computed().model().exact_s(112, 0)
    assert set(found.errors) == {
        "operators_tp1", "architecture_tp1", "operators_tp2", "architecture_tp2", "decode",
    }  # fmt: skip
    held_out = [(point["tp"], point["prompt_tokens"], point["cached_tokens"]) for point in told["points"]]
    assert len(set(held_out)) == len(held_out) == 2 * found.errors["operators_tp1"].num_points
    assert all(point["measured_s"] > 0 and point["operators_s"] > 0 for point in told["points"])
    assert told["calibration"]["kv_bytes_per_token"] == found.kv_bytes_per_token
    assert found.cost.prefill_s(64, 0) > 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--tokens", "many"), 2, "no list of numbers"),
        (("--tokens", "64"), 1, "ConfigError: prompt_tokens=(64,) has 1 different lengths; a fit needs at least 2"),
        (("--model", "/nowhere"), 1, "ModelNotFound: model '/nowhere' is no directory"),
        (("--out", "cal.json"), 1, "ConfigError: out=cal.json must end in .toml"),
        (("--recorded", "/nowhere.csv"), 1, "ConfigError: /nowhere.csv cannot be read as recorded requests"),
    ],
)
def test_what_a_user_gets_wrong_is_said_without_a_traceback(arguments: tuple[str, ...], code: int, says: str) -> None:
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    assert result.exit_code == code
    error = result.exception
    said = f"{type(error).__name__}: {error}" if isinstance(error, PoolweaveError) else result.output
    assert says in " ".join(said.replace("│", " ").split())
