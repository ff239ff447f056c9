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
    assert result.output.count("40/40 answered") == 2
    assert "P99 TTFT of session against prompt_tree: " in result.output
    assert "…" not in result.output  # it fits a terminal of 80 columns
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_has_every_figure_and_nothing_beside_it(trace: Path) -> None:
    arguments = ["simulate", str(trace), "--kind", "mooncake", "--instances", "colocated=2", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--requests", "30", "--rate", "5", "--seed", "3"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [point["series"] for point in told["points"]] == ["prompt_tree", "session", "least_load"]
    tree = told["points"][0]
    assert tree["rate"] == 5
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
        (("--kind", "sharegpt"), "cannot be read as a trace of kind sharegpt: it has no field"),
        (("--kind", "mooncake", "--policies", "prompt_tree,fastest"), "'fastest' is none of"),
        (("--kind", "mooncake", "--policies", ","), "names none"),
        (("--kind", "mooncake", "--flow", "pd"), "'pd' is none of colocated, colocated-caching, pd-basic"),
        (("--kind", "mooncake", "--instances", "prefill"), "no role and count"),
        (("--kind", "mooncake", "--instances", "cook=1"), "no role and count"),
        (("--kind", "mooncake", "--instances", "prefill=1"), "need each other"),
        (("--kind", "mooncake", "--instances", "colocated=0"), "above zero"),
        (("--kind", "mooncake", "--rate", "0"), "rate must be positive"),
        (("--kind", "mooncake", "--rate", "nan"), "rate must be positive"),
        (("--kind", "mooncake", "--seed", "-1"), "a seed must not be negative"),
        (("--kind", "mooncake", "--instances", "colocated=99999999999"), "more than the "),
        (("--kind", "mooncake", "--share", "0.5"), "kind mooncake has no share that can be varied; loogle and shared"),
        (("--kind", "mooncake", "--copies", "3"), "only loogle has copies"),
        (("--kind", "shared"), "kind shared is made up and takes no file"),
        (("--kind", "mooncake", "--figure", "7"), "figure '7' is none of 15, 8"),
        ((), "which kind of trace is it?"),
        (
            ("--kind", "mooncake", "--deaths", "4:prefill-9"),
            "'prefill-9' is to die but is none of prefill-0, prefill-1",
        ),
        (("--kind", "mooncake", "--deaths", "prefill-0"), "'prefill-0' is not of the form 4:prefill-1"),
        (("--kind", "mooncake", "--deaths", "soon:prefill-0"), "'soon' is no number of seconds"),
        (("--kind", "mooncake", "--deaths=-1:prefill-0"), "-1.0 is no time, which is 0 s or later"),
        (("--kind", "mooncake", "--loss", "1"), "message_loss must be in [0, 1)"),
        (("--kind", "mooncake", "--late-s=-1"), "message_delay_s: -1.0 is no time"),
        (("--kind", "mooncake", "--restart-s", "nan"), "restart_s: nan is no time"),
        (("--kind", "mooncake", "--pauses", "10"), "'10' is not of the form 10:5"),
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


def test_what_is_varied_is_in_the_table_the_json_and_the_picture(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    arguments = ["simulate", "--kind", "shared", "--share", "0,0.9", "--rate", "5,30", "--requests", "60"]
    arguments += ["--policies", "prompt_tree,session", "--plot", str(picture)]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "240/240 answered" in shown.output
    assert "…" not in shown.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    places = [(point["share"], point["rate"], point["series"]) for point in told["points"]]
    names = "prompt_tree", "session"
    assert places == [(share, rate, name) for share in (0.0, 0.9) for rate in (5.0, 30.0) for name in names]
    hits = {place: point["hit_ratio"] for place, point in zip(places, told["points"], strict=True)}
    assert hits[0.9, 5.0, "prompt_tree"] > hits[0.0, 5.0, "prompt_tree"] + 0.3
    assert [one["metric"] for one in told["contrasts"]] == ["P99 TTFT", "mean JCT"]


def test_flows_are_compared_like_policies() -> None:
    arguments = ["simulate", "--kind", "conversations", "--figure", "8", "--rate", "4", "--requests", "50", "--json"]
    told = json.loads(CliRunner().invoke(app, arguments).stdout)
    of = {point["series"]: point for point in told["points"]}
    assert list(of) == ["pd-caching-3", "pd-caching-2", "pd-caching-1", "pd-basic", "colocated-caching", "colocated"]
    assert of["pd-basic"]["hit_ratio"] == of["colocated"]["hit_ratio"] == 0
    assert of["colocated"]["moved_bytes"] == 0
    assert of["pd-caching-2"]["moved_bytes"] < of["pd-caching-3"]["moved_bytes"] < of["pd-caching-1"]["moved_bytes"]
    assert of["pd-caching-3"]["hit_ratio"] > of["pd-caching-2"]["hit_ratio"] == of["pd-caching-1"]["hit_ratio"] > 0


def test_deaths_lost_and_late_messages_and_pauses_are_options(trace: Path) -> None:
    """Whoever was on an instance that dies is asked again, and all are answered."""
    arguments = ["simulate", str(trace), "--kind", "mooncake", "--policies", "prompt_tree", "--rate", "20"]
    worse = [*arguments, "--deaths", "1:prefill-0,1.2:prefill-1", "--loss", "0.3", "--late-s", "0.5"]
    calm = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["points"][0]
    assert calm["retried"] == calm["expired_members"] == 0
    point = json.loads(CliRunner().invoke(app, [*worse, "--restart-s", "60", "--json"]).stdout)["points"][0]
    assert point["answered"] == 40
    assert point["retried"] > 0
    assert point["expired_members"] == 2
    assert point["ttft"]["p99"] > calm["ttft"]["p99"]
    shown = CliRunner().invoke(app, [*worse, "--stay-dead"])
    assert "2 instances taken for dead" in shown.output
    late = json.loads(CliRunner().invoke(app, [*worse, "--pauses", "1.5:40", "--json"]).stdout)["points"][0]
    assert late["answered"] == 40
    assert late["jct"]["p99"] > point["jct"]["p99"], "a coordinator that stands still notices deaths later"


def test_kv_is_moved_where_asked_for() -> None:
    arguments = ["simulate", "--kind", "shared", "--share", "0.9", "--rate", "30", "--requests", "120", "--json"]
    still, moved = (
        {point["series"]: point for point in json.loads(CliRunner().invoke(app, [*arguments, *more]).stdout)["points"]}
        for more in ([], ["--moves-kv"])
    )
    assert moved["prompt_tree"]["hit_ratio"] > still["prompt_tree"]["hit_ratio"]
    assert moved["prompt_tree"]["moved_bytes"] > still["prompt_tree"]["moved_bytes"]
