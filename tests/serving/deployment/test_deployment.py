"""A whole deployment of processes: it starts, is kept running, survives what is done to it, and ends."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("fastapi")

from ref_instance import answer_of, until
from ref_storm import Storm
from ref_words import save_words, text_of

from poolweave.config import from_mapping
from poolweave.errors import AddressInUse
from poolweave.serving.child import Program
from poolweave.serving.deployment import Deployment, DeploymentConfig, Onlooker, StartStopped
from poolweave.serving.instance_config import InstanceConfig

pytestmark = pytest.mark.multiproc
ROLES = ("prefill", "decode", "colocated")
PROMPTS = [[50 + n, 60, 70 + n] * 12 for n in range(6)]


def fake(config: InstanceConfig) -> Program:
    return Program(config.name, "ref_instance", config)


def settings(folder: Path, **changes: Any) -> DeploymentConfig:
    """Of fake instances, one a role, with short leases."""
    mapping = {
        "model": str(folder),
        "membership": {"ttl_s": 2.0, "heartbeat_s": 0.2},
        "restart_s": 0.05,
        "door": {"listen": "127.0.0.1:0", "wait_s": 30.0, "timeout_s": 60.0, "attempts": 10},
        "instances": [{"name": f"{role}-{os.getpid()}", "role": role} for role in ROLES],
    }
    return from_mapping({**mapping, **changes}, DeploymentConfig)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_words(tmp_path_factory.mktemp("models") / "echo")


@pytest.fixture(scope="module", autouse=True)
def fakes() -> Iterator[None]:
    """Instances without a model, in processes of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("poolweave.serving.deployment.deployment.instance_program", fake)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "reference"))
        patch.setenv("FAKE_TOKEN_S", "0.002")
        yield


@pytest.fixture(scope="module")
def deployment(words: Path, fakes: None) -> Iterator[Deployment]:
    before = set(psutil.Process().children(recursive=True))  # other tests' clusters
    told: list[str] = []
    printed: list[tuple[str, str]] = []
    onlooker = Onlooker(
        up=lambda name, address: told.append(name), printed=lambda name, line: printed.append((name, line))
    )
    with Deployment(settings(words), onlooker) as made:
        assert told[:2] == ["coordinator", "door"]
        assert set(told) == set(made.pids)
        names = set(told) - {"coordinator", "door"}
        until(lambda: {(name, f"{name} is a fake") for name in names} <= set(printed), "what they print is heard")
        yield made
    assert set(psutil.Process().children(recursive=True)) <= before, "no process is left"


def ask(deployment: Deployment) -> httpx.Response:
    body = {"model": "echo", "prompt": PROMPTS[0], "max_tokens": 9}
    return httpx.post(f"{deployment.url}/v1/completions", json=body, timeout=60)


def answers(deployment: Deployment) -> bool:
    try:
        answer = ask(deployment)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and answer.json()["choices"][0]["text"] == text_of(answer_of(PROMPTS[0], 9))


@pytest.mark.parametrize("part", ["coordinator", "door", "decode"])
def test_each_part_that_is_killed_comes_back_where_it_was(deployment: Deployment, part: str) -> None:
    until(lambda: answers(deployment), "it answers")
    url = deployment.url
    (name,) = (name for name in deployment.pids if name.startswith(part))
    pid = deployment.pids[name]
    os.kill(pid, signal.SIGKILL)
    until(lambda: deployment.pids.get(name, pid) != pid, f"{name} is started again")
    until(lambda: answers(deployment), "it answers again")
    assert deployment.url == url


def test_a_short_storm_leaves_every_answer_right_and_the_deployment_whole(deployment: Deployment) -> None:
    def right(which: int, length: int) -> str:
        return text_of(answer_of(PROMPTS[which], length))

    storm = Storm(deployment, "echo", right, PROMPTS)
    storm.blow(4.0, seed=1, pause_s=(0.1, 0.5))
    storm.heal(len(ROLES))
    assert not storm.wrong, storm.wrong[:3]
    assert storm.seen["answered"] > 0
    assert answers(deployment)


def test_a_door_that_cannot_start_ends_everything(words: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AddressInUse, match="set listen to another one"):
            Deployment(settings(words, door={"listen": listen}))
    assert {child.pid for child in psutil.Process().children()} == before


def test_the_end_asked_for_during_the_start_comes_at_once(words: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    ending = threading.Event()
    with pytest.raises(StartStopped):  # the coordinator is up, the others are on their way
        Deployment(settings(words), Onlooker(up=lambda name, address: ending.set(), ending=ending))
    assert {child.pid for child in psutil.Process().children()} == before


def test_ctrl_c_at_a_terminal_reaches_no_part(deployment: Deployment) -> None:
    assert all(os.getsid(pid) == pid for pid in deployment.pids.values())
