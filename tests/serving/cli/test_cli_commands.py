"""Every command: its help, wrong use, what a shell completes. Ctrl-C at the terminal of `poolweave up`."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import subprocess
import sys
import termios
import threading
from pathlib import Path

import httpx
import psutil
import pytest
from ref_instance import answer_of
from ref_waiting import until
from ref_words import save_words, text_of
from typer.testing import CliRunner

from poolweave import __version__
from poolweave.errors import ConfigError, PeerLost, PoolweaveError
from poolweave.serving.cli.app import app

COMMANDS = (
    "up", "top", "replay", "simulate", "calibrate", "instance", "coordinator", "pool", "demo", "flows", "plan",
    "doctor", "version", "config check", "config show", "bench cache", "bench transfer", "bench crosspool",
)  # fmt: skip
_SERVES = ("instance", "coordinator", "pool")  # they find nothing: they run until they are ended
PROMPT = [50, 60, 70] * 12


def recorded(folder: Path) -> Path:
    """A trace of two requests."""
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.0,37,4", "2023-11-16 18:15:46.1,30,4"
    path = folder / "azure.csv"
    path.write_text("\n".join(rows))
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_help_and_refuses_options_that_it_does_not_know(command: str) -> None:
    shown = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0
    assert command.split()[-1] in shown.output
    wrong = CliRunner().invoke(app, [*command.split(), "--no-such-thing"])
    assert wrong.exit_code == 2
    assert "No such option" in wrong.output


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in _SERVES])
def test_what_a_command_found_can_be_had_as_json(command: str) -> None:
    shown = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "160"})
    assert "--json" in shown.output
    assert "JSON" in shown.output.partition("--json")[2].partition("nothing else")[0]


def test_short_answers_as_json(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert json.loads(run(app, ["version", "--json"]).stdout) == {"poolweave": __version__}
    file = tmp_path / "deployment.toml"
    file.write_text('[[instances]]\nname = "one"\nrole = "colocated"\n')
    told = json.loads(run(app, ["config", "check", str(file), "--json"]).stdout)
    assert told == {"file": str(file), "kind": "deployment", "usable": True}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("instance", "/nowhere.toml"), "cannot read the config file /nowhere.toml"),
        (("instance", "{file}", "--name", "a b"), "instance name 'a b' must be 1 to 64 letters"),
        (("instance", "{file}", "--listen", "nonsense"), "listen='nonsense' cannot be bound"),
        (("coordinator", "--listen", "nonsense"), "listen='nonsense' cannot be bound"),
        (("coordinator", "--ttl-s", "3", "--heartbeat-s", "1"), "under a third of ttl_s=3.0"),
        (("replay", "/nowhere", "--kind", "azure"), "there is no trace file /nowhere"),
        (("replay", "{trace}", "--kind", "azur"), "'azur' is none of mooncake"),
        (("replay", "{trace}", "--kind", "azure"), "holds no requests"),
        (("replay", "{full}", "--kind", "azure", "--rate", "0"), "rate must be positive"),
        (("replay", "{full}", "--kind", "azure", "--speed", "nan"), "speed must be positive"),
        (("replay", "{full}", "--kind", "azure", "--speed", "0"), "speed must be positive"),
        (("up", "/nowhere.toml"), "cannot read the config file /nowhere.toml"),
        (("up", "{file}"), "unknown key 'name'"),
        (("config", "check", "{empty}"), "empty.toml: lacks instances"),
        (("config", "check", "{boss}"), "instances[0].role 'boss' is none of prefill, decode, colocated"),
        (("config", "show", "{boss}", "--kind", "no"), "kind 'no' is none of deployment, instance"),
        (("top", "nonsense", "--once"), "'nonsense/deployment' is no URL: it begins with http:// or https://"),
    ],
)
def test_what_cannot_be_done_is_one_typed_error(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    file, trace = tmp_path / "instance.toml", tmp_path / "trace.csv"
    file.write_text('name = "one"\nrole = "colocated"\n')
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    full, empty, boss = recorded(tmp_path), tmp_path / "empty.toml", tmp_path / "boss.toml"
    empty.write_text("")
    boss.write_text('[[instances]]\nname = "one"\nrole = "boss"\n')
    given = [word.format(file=file, trace=trace, full=full, empty=empty, boss=boss) for word in arguments]
    result = CliRunner().invoke(app, given)
    assert isinstance(result.exception, PoolweaveError), result.output  # one line and exit code 1: see test_cli.py
    assert says in str(result.exception)


@pytest.mark.parametrize(
    ("url", "kind", "says"),
    [
        ("nonsense", ConfigError, "is no URL"),
        ("http://127.0.0.1:nonsense", ConfigError, "is no URL"),
        ("http://127.0.0.1:1", PeerLost, "http://127.0.0.1:1/v1/models does not answer"),
    ],
)
def test_a_replay_against_nobody_is_refused_before_anything_is_asked(
    tmp_path: Path, url: str, kind: type[PoolweaveError], says: str
) -> None:
    result = CliRunner().invoke(app, ["replay", str(recorded(tmp_path)), "--kind", "azure", "--url", url, "--json"])
    assert isinstance(result.exception, kind), result.output
    assert says in str(result.exception)
    assert result.stdout == ""


@pytest.mark.multiproc
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(shell: str) -> None:
    """As the script of `poolweave --install-completion` asks."""
    words = {"COMP_WORDS": "poolweave cal", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "poolweave cal"}
    environment = {
        **os.environ,
        **words,
        "_POOLWEAVE_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    code = "import sys; sys.argv = ['poolweave']; from poolweave.serving.cli import main; main()"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "calibrate" in asked.stdout, asked.stderr
    assert "coordinator" not in asked.stdout


_UP = """
import sys
import poolweave.serving.deployment.deployment as deployment
from poolweave.serving.process.child import Program
from poolweave.serving.cli import main
deployment.instance_program = lambda config: Program(config.name, "ref_instance", config)
sys.argv = ["poolweave", "up", sys.argv[1]]
main()
"""


@pytest.mark.multiproc
def test_ctrl_c_at_the_terminal_of_up_drains_and_leaves_nothing(tmp_path: Path) -> None:
    """The instances are fakes without a model; the terminal, the signal and all processes are real."""
    file = tmp_path / "deployment.toml"
    model = save_words(tmp_path / "echo")
    roles = "".join(
        f'[[instances]]\nname = "{role}-{os.getpid()}-c"\nrole = "{role}"\n' for role in ("prefill", "decode")
    )
    file.write_text(f'model = "{model}"\n[door]\nlisten = "127.0.0.1:0"\n{roles}')
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "reference"), "FAKE_TOKEN_S": "0.05"}
    process = subprocess.Popen(
        [sys.executable, "-c", _UP, str(file)], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env=environment, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    screen = Screen(ours)
    try:
        until(lambda: "serving at" in screen.text, "it is up")
        parts = psutil.Process(process.pid).children(recursive=True)
        assert len(parts) == 6  # the coordinator, two instances, the door, and two that wait to follow one that dies
        url = screen.text.partition("serving at ")[2].split()[0]
        assert httpx.get(f"{url.removesuffix('/v1')}/ready", timeout=60).status_code == 200, "its instances can be used"
        body = {"model": "echo", "prompt": PROMPT, "max_tokens": 40, "stream": True}
        with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            os.write(ours, b"\x03")
            until(lambda: "draining" in screen.text, "it drains")
            told = [first, *lines]
        assert told[-2:] == ["data: [DONE]", ""] or "data: [DONE]" in told, "the answer is whole"
        text = "".join(line.partition('"text":"')[2].partition('"')[0] for line in told)
        assert text == text_of(answer_of(PROMPT, 40))
        assert process.wait(60) == 0
        until(lambda: not any(part.is_running() for part in parts), "no process is left")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert "Traceback" not in screen.text


class Screen:
    """What a terminal shows, read until it is closed."""

    def __init__(self, descriptor: int) -> None:
        self.text = ""
        self._descriptor = descriptor
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                read = os.read(self._descriptor, 4096)
            except OSError:  # the other end is closed, or this one
                return
            self.text += read.decode(errors="replace")
