"""A whole deployment of processes: it starts, is kept running, survives what is done to it, and ends."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("fastapi")

from ref_instance import answer_of
from ref_storm import Storm
from ref_waiting import until
from ref_whole import Whole
from ref_words import save_words, text_of

from poolweave.config import from_mapping
from poolweave.errors import AddressInUse, ConfigError, DeadlineExceeded
from poolweave.scheduler.membership import MembershipConfig
from poolweave.serving.deployment import Deployment, DeploymentConfig, Onlooker, StartStopped
from poolweave.serving.deployment.readiness import named_by, routed_by
from poolweave.serving.instance.config import InstanceConfig
from poolweave.serving.process.child import Program

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
        assert httpx.get(f"{made.url}/ready", timeout=60).status_code == 200, "whom up calls serving can be asked"
        assert made.readiness.lacking() == []
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


def waiting(deployment: Deployment) -> set[int]:
    """The two that follow those who die."""
    spares = deployment.spares
    assert spares is not None
    until(lambda: len(spares.pids) == 2, "two wait")
    return set(spares.pids)


@pytest.mark.parametrize("kinds", [("decode",), ("decode", "prefill")], ids="+".join)
def test_instances_that_die_are_followed_by_processes_that_waited(
    deployment: Deployment, kinds: tuple[str, ...]
) -> None:
    spares = deployment.spares
    assert spares is not None
    before, given, whole = waiting(deployment), spares.given, Whole(deployment)
    names = {name for name in deployment.pids if name.startswith(kinds)}
    whole.kill(names)
    until(whole.again, f"{kinds} are back")
    assert {deployment.pids[name] for name in names} <= before, "they are who waited"
    assert spares.given == given + len(names)
    waiting(deployment)
    until(lambda: answers(deployment), "it answers")


def test_three_that_die_at_once_are_back_before_other_spares_are_started(deployment: Deployment) -> None:
    before, whole = waiting(deployment), Whole(deployment)
    names = [name for name in deployment.pids if name.startswith(ROLES)]
    whole.kill(names)
    until(whole.again, "all are back")
    new = {deployment.pids[name] for name in names}
    assert before < new, "two are who waited"
    (other,) = new - before
    after = waiting(deployment)
    assert all(psutil.Process(pid).create_time() > psutil.Process(other).create_time() for pid in after)
    until(lambda: answers(deployment), "it answers")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_spares_that_died_or_are_stopped_are_not_given_out(deployment: Deployment, number: signal.Signals) -> None:
    whole, useless = Whole(deployment), waiting(deployment)
    for pid in useless:
        os.kill(pid, number)
    names = {name for name in deployment.pids if name.startswith("decode")}
    whole.kill(names)
    until(whole.again, "it is back")
    assert not useless & {deployment.pids[name] for name in names}
    until(lambda: not useless & waiting(deployment), "others wait")
    assert not any(psutil.pid_exists(pid) for pid in useless)


@pytest.mark.parametrize("part", ["coordinator", "door", "decode"])
def test_each_part_that_stands_still_is_ended_after_a_ttl_and_follows_itself(deployment: Deployment, part: str) -> None:
    whole = Whole(deployment)
    (name,) = (name for name in deployment.pids if name.startswith(part))
    whole.kill([name], signal.SIGSTOP)
    until(whole.again, f"{name} is another process")
    until(lambda: answers(deployment), "it answers again")


def test_who_stood_still_for_less_than_a_ttl_goes_on(deployment: Deployment) -> None:
    whole = Whole(deployment)
    for name, pid in deployment.pids.items():
        os.kill(pid, signal.SIGSTOP)
        until(lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED, f"{name} stands")  # type: ignore[misc]
        os.kill(pid, signal.SIGCONT)
    until(lambda: answers(deployment), "it answers")
    until(whole.again, "all are there")
    assert deployment.pids == whole.pids


def test_a_short_storm_leaves_every_answer_right_and_the_deployment_whole(deployment: Deployment) -> None:
    def right(which: int, length: int) -> str:
        return text_of(answer_of(PROMPTS[which], length))

    storm = Storm(deployment, "echo", right, PROMPTS)
    storm.blow(4.0, seed=1, pause_s=(0.1, 0.5))
    storm.heal()
    assert not storm.wrong, storm.wrong[:3]
    assert storm.seen["answered"] > 0
    assert answers(deployment)


def test_who_is_not_routed_to_is_waited_for_named_and_not_for_ever(deployment: Deployment) -> None:
    until(lambda: not deployment.readiness.lacking(), "everybody is there")
    more = replace(deployment.readiness, names=[*deployment.readiness.names, "nobody"])
    assert more.lacking() == ["nobody"]
    with pytest.raises(DeadlineExceeded, match=r"the door does not reach nobody after 0.1 s: .* raise start_timeout_s"):
        more.wait(0.1, threading.Event())
    ended = threading.Event()
    ended.set()
    assert not more.wait(0.1, ended)
    for nowhere in (
        routed_by("http://127.0.0.1:1", None, more.names),
        named_by("tcp://127.0.0.1:1", MembershipConfig(ttl_s=1.0, heartbeat_s=0.1), more.names),
    ):
        assert nowhere.lacking() == sorted(more.names)


def test_instances_can_join_a_door_that_is_elsewhere(deployment: Deployment, words: Path) -> None:
    name = f"guest-{os.getpid()}"
    guest = [{"name": name, "role": "decode"}]  # the others that it needs are there
    changes = {"instances": guest, "registry": deployment.registry, "serves": False, "spares": 0}
    config = settings(words, **{**changes, "door": {}})
    with Deployment(config) as joined:
        assert joined.pids.keys() == {name}
        assert joined.readiness.lacking() == []
        both = replace(deployment.readiness, names=[*deployment.readiness.names, name])
        until(lambda: not both.lacking(), "the door reaches it")
        pid = joined.pids[name]
        os.kill(pid, signal.SIGKILL)
        until(lambda: joined.pids.get(name, pid) != pid, "it is started again")
        until(lambda: not both.lacking(), "the door reaches it again")
    until(lambda: name in both.lacking(), "it has left")
    assert answers(deployment)


def test_spares_are_none_or_more(words: Path) -> None:
    with pytest.raises(ConfigError, match="spares must be at least 0, got -1"):
        settings(words, spares=-1)


def test_choosing_decode_instances_wants_to_know_what_a_step_takes(words: Path) -> None:
    cost = {"constant_s": 0.1, "linear_s": 0.01}
    door = {"listen": "127.0.0.1:0", "routing": {"cost": cost}}
    with pytest.raises(ConfigError, match=r"door.routing.cost has no decode part.* give cost.decode"):
        settings(words, door=door)
    settings(words, door=door, instances=[{"name": "alone", "role": "colocated"}])
    settings(words, door={**door, "routing": {"cost": {**cost, "decode": {"constant_s": 0.1}}}})


def test_who_joins_a_door_elsewhere_says_where_and_has_none(words: Path) -> None:
    alone = {"instances": [{"name": "guest", "role": "decode"}], "serves": False}
    with pytest.raises(ConfigError, match="need its registry: set registry, or serves = true"):
        settings(words, **{**alone, "door": {}})
    with pytest.raises(ConfigError, match=r"with serves = false no door is started: leave \[door\] out"):
        settings(words, **alone, registry="tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="prefill and decode instances need each other"):
        settings(words, **{**alone, "serves": True})


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
