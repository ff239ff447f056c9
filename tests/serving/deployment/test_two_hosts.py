"""Instances on two hosts: one joins from a network namespace of its own, and KV crosses between them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from ref_transformers import greedy, save_random_model, save_tokenizer
from ref_waiting import until

from poolweave.scheduler.membership import MembershipConfig
from poolweave.serving.door.config import DoorConfig
from poolweave.serving.door.prompter import load_prompter
from poolweave.serving.instance.config import InstanceConfig
from poolweave.serving.membership import open_registry
from poolweave.serving.membership.coordinator import CoordinatorConfig
from poolweave.serving.process.child import Child, Program, instance_program
from poolweave.types import Role

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(600)]
NEAR, FAR = "10.231.77.1", "10.231.77.2"
PROMPT = [50, 60, 70, 80] * 20


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)


@pytest.fixture
def far_host() -> Iterator[str]:
    """A network namespace that is reached at FAR, and from which this one is at NEAR."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    name, near, far = (f"pw{part}{os.getpid() % 10**6}" for part in ("h", "n", "f"))
    run("ip", "netns", "add", name)
    try:
        run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        run("ip", "addr", "add", f"{NEAR}/30", "dev", near)
        run("ip", "link", "set", near, "up")
        for words in (
            ("addr", "add", f"{FAR}/30", "dev", far),
            ("link", "set", far, "up"),
            ("link", "set", "lo", "up"),
        ):
            run("ip", "-n", name, *words)
        yield name
    finally:
        run("ip", "netns", "del", name)  # the pair goes with it


_UP = (
    "import sys; from poolweave.serving.cli import main; sys.argv = ['poolweave', 'up', sys.argv[1], '--json']; main()"
)


class Up:
    """`poolweave up` on one of the hosts, once it says that it is there."""

    def __init__(self, file: Path, *enter: str) -> None:
        command = [*enter, sys.executable, "-c", _UP, str(file)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.said: dict[str, Any] = {"event": ""}
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said = json.loads(line)
            if self.said["event"] in ("ready", "joined"):
                break

    def close(self) -> None:
        self._process.terminate()
        assert self._process.wait(120) == 0
        assert self._process.stdout is not None
        self._process.stdout.close()


def test_a_deployment_is_spread_over_two_hosts_by_up_on_each(far_host: str, tmp_path: Path) -> None:
    """The far decode instance is the only one left to decode; killed, its own `up` brings it back."""
    folder = save_tokenizer(save_random_model("llama", tmp_path / "llama", vocab_size=260))
    near, far = tmp_path / "near.toml", tmp_path / "far.toml"
    shared = 'hbm = "24MiB"\n'
    near.write_text(
        f'model = "{folder}"\ncoordinator = "tcp://{NEAR}:0"\n[door]\nlisten = "127.0.0.1:0"\nwait_s = 60.0\n'
        + "".join(
            f'[[instances]]\nname = "{role}-0"\nrole = "{role}"\nlisten = "tcp://{NEAR}:0"\n{shared}'
            for role in ("prefill", "decode")
        )
    )
    with ExitStack() as undo:
        here = Up(near)
        undo.callback(here.close)
        url, registry = here.said["url"], here.said["registry"]
        far.write_text(
            f'model = "{folder}"\nregistry = "{registry}"\nserves = false\n'
            f'[[instances]]\nname = "decode-1"\nrole = "decode"\nlisten = "tcp://{FAR}:0"\n{shared}'
        )
        there = Up(far, "ip", "netns", "exec", far_host)
        undo.callback(there.close)
        assert there.said == {"event": "joined", "url": None, "registry": registry, "pids": there.said["pids"]}

        def state(name: str) -> tuple[str, int]:
            found = httpx.get(f"{url}/deployment", timeout=60).json()["instances"]
            return next(((one["state"], one["epoch"]) for one in found if one["name"] == name), ("", 0))

        until(lambda: state("decode-1")[0] == "active", "the door reaches the other host")
        admin = open_registry(registry, MembershipConfig())
        undo.callback(admin.close)
        admin.drain("decode-0")
        until(lambda: state("decode-0")[0] == "draining", "only the far one is given requests")
        stream = load_prompter(str(folder)).stream(PROMPT)
        for token in greedy(folder, tuple(PROMPT), 12):
            stream.append(token)
        stream.flush()
        body = {"model": folder.name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}

        def answers() -> None:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == stream.text

        answers()
        epoch = state("decode-1")[1]
        os.kill(there.said["pids"]["decode-1"], signal.SIGKILL)
        until(lambda: state("decode-1")[0] == "active" and state("decode-1")[1] != epoch, "it is back")
        answers()


def test_an_instance_on_another_host_joins_by_the_registrys_address(far_host: str, tmp_path: Path) -> None:
    folder = save_tokenizer(save_random_model("llama", tmp_path / "llama", vocab_size=260))
    with ExitStack() as undo:

        def start(program: Program) -> str:
            child = Child(program)
            undo.callback(child.close)
            return child.wait_ready(300)

        near = f"tcp://{NEAR}:0"
        module = "poolweave.serving.membership.coordinator"
        registry = start(Program("coordinator", module, CoordinatorConfig(listen=near)))
        here = InstanceConfig(
            name="prefill-0", role=Role.PREFILL, model=str(folder), registry=registry, listen=near, hbm="24MiB"
        )
        start(instance_program(here))
        settings = tmp_path / "decode.toml"
        settings.write_text(
            f'name = "decode-0"\nrole = "decode"\nmodel = "{folder}"\nregistry = "{registry}"\n'
            f'listen = "tcp://{FAR}:0"\nhbm = "24MiB"\n'
        )
        command = ["ip", "netns", "exec", far_host, sys.executable, "-m", "poolweave.serving.instance.process"]
        there = subprocess.Popen([*command, "--config", str(settings)], stdout=subprocess.PIPE, text=True)
        undo.callback(there.wait, 60)
        undo.callback(there.terminate)
        assert there.stdout is not None
        undo.callback(there.stdout.close)
        assert there.stdout.readline().startswith(f"tcp://{FAR}:")
        door = DoorConfig(registry=registry, model=str(folder), listen="127.0.0.1:0", wait_s=60.0)
        url = start(Program("door", "poolweave.serving.door.server", door))
        until(lambda: httpx.get(f"{url}/ready", timeout=60).status_code == 200, "both are linked")
        stream = load_prompter(str(folder)).stream(PROMPT)
        for token in greedy(folder, tuple(PROMPT), 12):
            stream.append(token)
        stream.flush()
        for turn in range(2):
            body = {"model": folder.name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == stream.text
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == turn * (len(PROMPT) - 16)
