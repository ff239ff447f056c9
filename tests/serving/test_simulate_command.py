from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from poolweave.errors import ConfigError
from poolweave.serving.cli.app import app


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Mooncake's format: forty prompts of two blocks, of which the first is one of four."""
    lines = [
        {"timestamp": 400 * i, "input_length": 1100, "output_length": 20, "hash_ids": [i % 4, 100 + i, 1000 + i]}
        for i in range(40)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_policies_are_compared_in_a_table_and_a_picture(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "deep" / "policies.png"
    result = CliRunner().invoke(
        app, ["simulate", str(trace), "--kind", "mooncake", "--policies", "session,prompt_tree", "--plot", str(picture)]
    )
    assert result.exit_code == 0, result.output
    assert "mooncake on prefill=3,decode=1" in result.output
    assert result.output.index("session") < result.output.index("prompt_tree")
    assert result.output.count("40/40") == 2
    assert "…" not in result.output  # it fits a terminal of 80 columns
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_has_every_figure_and_nothing_beside_it(trace: Path) -> None:
    arguments = ["simulate", str(trace), "--kind", "mooncake", "--instances", "colocated=2", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--requests", "30", "--rate", "5", "--seed", "3"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert list(told["policies"]) == ["prompt_tree", "session", "least_load"]
    tree = told["policies"]["prompt_tree"]
    assert tree["answered"] == 30
    assert 0 < tree["ttft"]["p50"] <= tree["ttft"]["p99"] <= tree["jct"]["p99"]
    assert tree["hit_ratio"] == pytest.approx(26 * 512 / (30 * 1100), abs=0.2)
    assert tree["balance"] >= 1
    again = CliRunner().invoke(app, [*arguments, "--requests", "30", "--rate", "5", "--seed", "3"])
    assert json.loads(again.stdout) == told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--kind", "mooncak"), "'mooncak' is none of mooncake"),
        (("--kind", "react"), "cannot be read as a trace of kind react"),
        (("--kind", "sharegpt"), "cannot be read as a trace of kind sharegpt: KeyError"),
        (("--kind", "mooncake", "--policies", "prompt_tree,fastest"), "'fastest' is none of"),
        (("--kind", "mooncake", "--policies", ","), "names none"),
        (("--kind", "mooncake", "--flow", "pd"), "'pd' is none of pd-basic"),
        (("--kind", "mooncake", "--instances", "prefill"), "no role and count"),
        (("--kind", "mooncake", "--instances", "cook=1"), "no role and count"),
        (("--kind", "mooncake", "--instances", "prefill=1"), "need each other"),
        (("--kind", "mooncake", "--instances", "colocated=0"), "above zero"),
        (("--kind", "mooncake", "--rate", "0"), "rate must be positive"),
    ],
)
def test_what_cannot_be_simulated_is_refused(trace: Path, arguments: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(app, ["simulate", str(trace), *arguments])
    assert isinstance(result.exception, ConfigError)  # one line on stderr: see test_cli.py
    assert says in str(result.exception)


def test_an_empty_or_missing_trace_is_refused(trace: Path, tmp_path: Path) -> None:
    trace.write_text("")
    for path, says in ((trace, "holds no requests"), (tmp_path / "none.jsonl", "there is no trace file")):
        result = CliRunner().invoke(app, ["simulate", str(path), "--kind", "mooncake"])
        assert isinstance(result.exception, ConfigError)
        assert says in str(result.exception)
