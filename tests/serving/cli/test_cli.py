"""The command `poolweave` as a user runs it: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ref_words import save_words

import poolweave

pytestmark = pytest.mark.multiproc

COMMAND = [sys.executable, "-m", "poolweave"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100", **environment},
    )


def test_version() -> None:
    result = run("version")
    assert (result.returncode, result.stdout) == (0, poolweave.__version__ + "\n")


def test_help_names_every_command() -> None:
    result = run("--help")
    assert result.returncode == 0
    assert all(name in result.stdout for name in ("demo", "flows", "doctor", "plan", "version"))


def test_a_wrong_option_is_a_usage_error() -> None:
    result = run("flows", "--flow", "x")
    assert result.returncode == 2
    assert "--flows" in result.stderr


@pytest.mark.parametrize("arguments", [("doctor",), ("doctor", "--json")])
def test_doctor(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.returncode == 0, result.stdout
    assert json.loads(result.stdout)["ok"] if "--json" in arguments else "vm.max_map_count" in result.stdout


@pytest.mark.parametrize("module", ["typer", "rich", "matplotlib", "transformers"])
def test_a_missing_extra_is_said_with_the_command_that_installs_it(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError('hidden', name={module!r})\n")
    result = run("flows", "--model", str(tmp_path), PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith(f"poolweave: this needs the package {module}, which is not installed: pip install")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--flows", "pd-basic,pd-nine"), "ConfigError: flow 'pd-nine' is not one of pd-basic"),
        (("--transport", "pigeon"), "ConfigError: transport 'pigeon' is neither 'shm' nor 'tcp'"),
        (("--turns", "0"), "ConfigError: turns must be at least 1, got 0"),
        (("--sessions", "/nowhere.jsonl"), "ConfigError: cannot read the sessions file /nowhere.jsonl"),
        (("--config", "/nowhere.toml"), "ConfigError: cannot read the config file /nowhere.toml"),
        (("--out", "/proc/here"), "ConfigError: cannot make the folder /proc/here"),
        (("--model", "/nowhere/model"), "ModelNotFound: /nowhere/model is no directory"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line_and_exit_code_1(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    out = () if "--out" in arguments else ("--out", str(tmp_path))
    result = run("flows", *out, *arguments)
    assert result.returncode == 1
    assert result.stderr.startswith(f"poolweave: {says}"), result.stderr
    assert result.stderr.count("\n") == 1


def test_a_misspelt_key_of_the_config_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "flows.toml"
    file.write_text("tuns = 2\n")
    result = run("flows", "--config", str(file))
    assert result.returncode == 1
    assert result.stderr == f"poolweave: ConfigError: {file}: unknown key 'tuns'; did you mean 'turns'?\n"


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_small_comparison_of_flows_ends_with_a_table_a_picture_and_a_json(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from ref_transformers import save_random_model, save_tokenizer

    model = save_tokenizer(save_random_model("llama", tmp_path / "model"))
    config = tmp_path / "flows.toml"
    config.write_text(f'model = "{model}"\nmax_new_tokens = 6\nhbm = "64MiB"\nturns = 3\nmax_sessions = 1\n')
    result = run(
        "flows", "--config", str(config), "--out", str(tmp_path / "out"), "--max-sessions", "3", "--turns", "2"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for line in ("pd-basic", "pd-caching-3", "colocated", "every flow gives the same tokens", "MiB", "TTFT", "JCT"):
        assert line in result.stdout
    assert (tmp_path / "out" / "flows.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "out" / "flows.json").read_text())
    assert found["complete"]
    assert found["as_predicted"]
    assert found["equal_tokens"]
    assert [flow["flow"] for flow in found["flows"]] == [
        "pd-basic", "pd-caching-1", "pd-caching-2", "pd-caching-3", "colocated",
    ]  # fmt: skip
    assert all(flow["requests"] == 6 for flow in found["flows"])
    assert len(found["requests"]) == 30
    assert found["settings"]["max_sessions"] == 3, "an option goes before the file"
    assert found["settings"]["max_new_tokens"] == 6


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("as_json", [False, True], ids=["a table", "JSON"])
def test_a_comparison_whose_requests_fail_says_so_and_exits_with_1(tmp_path: Path, as_json: bool) -> None:
    """A prompt longer than the model's positions fails its session; the others are answered."""
    pytest.importorskip("torch")
    from ref_transformers import save_random_model, save_tokenizer

    model = save_tokenizer(save_random_model("llama", tmp_path / "model"))
    rows = [{"session": "fits", "turn": 0, "user": "hi"}, {"session": "too long", "turn": 0, "user": "x" * 2000}]
    sessions = tmp_path / "sessions.jsonl"
    sessions.write_text("\n".join(json.dumps(row) for row in rows))
    result = run(
        "flows", "--model", str(model), "--sessions", str(sessions), "--flows", "pd-caching-3", "--transport", "tcp",
        "--max-new-tokens", "4", "--out", str(tmp_path / "out"), *(("--json",) if as_json else ()),
    )  # fmt: skip
    assert result.returncode == 1
    if as_json:
        assert result.stdout == (tmp_path / "out" / "flows.json").read_text()
    else:
        assert "not so: every request was answered (1 times)" in result.stdout
        assert "too long turn 1" in result.stdout
    found = json.loads((tmp_path / "out" / "flows.json").read_text())
    assert not found["complete"]
    assert [row.get("answer_tokens") for row in found["requests"]] == [4, None]


def test_the_help_of_plan_names_its_tables() -> None:
    result = run("plan", "--help", COLUMNS="200")
    assert "TOML: [devices], [[models]] with model and trace each." in result.stdout


DEPLOYMENT = """
[door]
listen = "127.0.0.1:0"
[[door.keys]]
name = "a"
key = "sk-secret"
[[instances]]
name = "one"
role = "colocated"
"""


def test_config_show_prints_value_and_source_and_no_secret(tmp_path: Path) -> None:
    """C35."""
    file = tmp_path / "deployment.toml"
    file.write_text(DEPLOYMENT)
    assert run("config", "check", str(file)).stdout == f"{file} is a usable deployment file\n"
    shown = run("config", "show", str(file), "--json")
    rows = {row["setting"]: (row["value"], row["source"]) for row in json.loads(shown.stdout)}
    assert rows["door.listen"] == ("127.0.0.1:0", "file")
    assert rows["door.max_in_flight"] == (256, "default")
    assert rows["instances[0].role"] == ("colocated", "file")
    assert rows["membership.ttl_s"] == (10.0, "default")
    assert "sk-secret" not in shown.stdout


@pytest.mark.parametrize("lacks", ["tokenizer.json", "tokenizer_config.json"])
def test_config_check_wants_the_tokenizer_that_a_door_reads(tmp_path: Path, lacks: str) -> None:
    model = save_words(tmp_path / "model")
    for name in ("config.json", "model.safetensors"):
        (model / name).touch()
    file = tmp_path / "deployment.toml"
    file.write_text(f'model = "{model}"\n[[instances]]\nname = "one"\nrole = "colocated"\n')
    assert run("config", "check", str(file)).returncode == 0
    (model / lacks).unlink()
    result = run("config", "check", str(file))
    assert result.returncode == 1
    assert f"{model} holds no {lacks}, without which a door cannot read and write text" in result.stderr
    joins = 'serves = false\nregistry = "tcp://127.0.0.1:1"\n'
    file.write_text(joins + file.read_text())
    assert run("config", "check", str(file)).returncode == 0, "the door is elsewhere"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("restart = 3", "unknown key 'restart'; did you mean 'restart_s'?"),
        ("[membership]\nheartbeat_s = 9.0", "heartbeat_s=9.0 must be positive and under a third of ttl_s=10.0"),
        ('[door.routing]\npolicy = "best"', "policy='best' is none of "),
        ('[door]\nmax_body = "8 apples"', "max_body='8 apples' is no size"),
        ('model = "/no/such/model"', "model '/no/such/model' is no directory"),
        ("spares = true", "spares must be a whole number, not true or false"),
        ("[door]\nmax_inflight = 3", "unknown key 'door.max_inflight'; did you mean 'max_in_flight'?"),
    ],
)
def test_config_check_says_what_is_wrong_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    """C32, C35."""
    file = tmp_path / "deployment.toml"
    file.write_text(f'{text}\n[[instances]]\nname = "one"\nrole = "colocated"\n')
    result = run("config", "check", str(file))
    assert result.returncode == 1
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_top_of_nobody_is_one_line() -> None:
    result = run("top", "http://127.0.0.1:1", "--once")
    assert result.returncode == 1
    assert result.stderr == "poolweave: PeerLost: http://127.0.0.1:1/deployment does not answer: Connection refused\n"
