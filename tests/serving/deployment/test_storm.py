"""Ten minutes of kills and stops over a deployment with a real engine; and a client that goes away from one."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from ref_storm import Storm
from ref_transformers import greedy, save_random_model, save_tokenizer
from ref_waiting import until

from poolweave.config import from_mapping
from poolweave.serving.deployment import Deployment, DeploymentConfig
from poolweave.serving.door.prompter import load_prompter

pytestmark = [pytest.mark.multiproc, pytest.mark.engine, pytest.mark.slow]
KINDS = ("prefill", "decode", "colocated", "crosspool")
WORKERS = 2  # of the CrossPool instance
SPARES = 2
PROMPTS = [[50 + n, 60, 70 + n, 80] * (8 + n) for n in range(4)]
STORM_S = float(os.environ.get("POOLWEAVE_STORM_S", "600"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral, which instances of both kinds can run; its vocabulary is its tokenizer's."""
    return save_tokenizer(save_random_model("mixtral", tmp_path_factory.mktemp("models") / "mixtral", vocab_size=260))


def deploy(folder: Path, *kinds: str) -> Deployment:
    mapping: dict[str, Any] = {
        "models": [{"name": folder.name, "path": str(folder)}],
        "door": {"listen": "127.0.0.1:0", "wait_s": 60.0, "timeout_s": 110.0, "attempts": 20},
        "instances": [instance(kind) for kind in kinds],
    }
    return Deployment(from_mapping(mapping, DeploymentConfig))


def instance(kind: str) -> dict[str, Any]:
    named = {"name": f"{kind}-{os.getpid()}", "role": kind, "hbm": "24MiB", "lease_s": 20.0}
    if kind != "crosspool":
        return named
    pools = {"kv_budget": "8MiB", "max_tokens": 512, "max_batch": 2}
    return {**named, "role": "decode", "kind": "crosspool", "crosspool": pools}


def descriptors(deployment: Deployment) -> dict[str, int]:
    return {name: psutil.Process(pid).num_fds() for name, pid in deployment.pids.items()}


def below(deployment: Deployment) -> list[psutil.Process]:
    """Everything that it started, and what that started."""
    started = {*deployment.pids.values(), *(deployment.spares.pids if deployment.spares is not None else ())}
    return [one for one in psutil.Process().children(recursive=True) if {one.pid, one.ppid()} & started]


@pytest.mark.timeout(STORM_S + 900)
def test_ten_minutes_of_kills_and_stops_leave_every_answer_right(
    folder: Path, record_property: Callable[[str, object], None]
) -> None:
    prompter = load_prompter(str(folder))

    def right(which: int, length: int) -> str:
        stream = prompter.stream(PROMPTS[which])
        for token in greedy(folder, tuple(PROMPTS[which]), 20)[:length]:
            stream.append(token)
        stream.flush()
        return stream.text

    before, others = psutil.Process().num_fds(), set(psutil.Process().children(recursive=True))
    memory = set(os.listdir("/dev/shm"))
    with deploy(folder, *KINDS) as deployment:
        spares = deployment.spares
        assert spares is not None
        storm = Storm(deployment, folder.name, right, PROMPTS)
        storm.ask(1.0)  # what is opened with the first requests is
        storm.heal()
        at_first = descriptors(deployment)
        storm = Storm(deployment, folder.name, right, PROMPTS)
        storm.blow(STORM_S, seed=7, pause_s=(3.0, 15.0))
        healed_s = storm.heal()
        record_property("whole_s_of_two_ttls_20_s", round(healed_s, 1))
        record_property("seen", dict(storm.seen))
        assert not storm.wrong, storm.wrong[:3]
        assert storm.seen["answered"] > 0, storm.seen
        died = sum(storm.seen[f"SIGKILL {kind}"] for kind in KINDS)
        assert spares.given or not died, "instances that died were followed by a process that had torch already"
        until(lambda: len(spares.pids) == SPARES, "the next ones wait")
        most = len(deployment.pids) + SPARES + WORKERS  # less one that is replaced with the next request
        until(lambda: len(below(deployment)) <= most, "of the dead nobody is left")
        with suppress(AssertionError):
            until(lambda: not grown(at_first, descriptors(deployment)), "connections to the dead are closed")
        assert not grown(at_first, descriptors(deployment)), at_first
    assert set(psutil.Process().children(recursive=True)) <= others
    assert set(os.listdir("/dev/shm")) <= memory
    until(lambda: psutil.Process().num_fds() <= before, "its descriptors are closed")


def grown(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    """Parts with more descriptors than connections to everybody else can explain."""
    return {name: now[name] for name in now if now[name] > before[name] + 8 * len(before)}


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Deployment]:
    with deploy(folder, "prefill", "decode") as made:
        assert httpx.get(f"{made.url}/ready", timeout=60).status_code == 200
        yield made


def usage(deployment: Deployment) -> list[float]:
    found = httpx.get(f"{deployment.url}/deployment", timeout=60).json()["instances"]
    return [one["kv_usage"] for one in found]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.05, 0.1, 0.3, 1.0])
def test_a_client_that_goes_away_leaves_no_block_behind(pair: Deployment, folder: Path, after_s: float) -> None:
    """C33, wherever the request is by then; leases of 20 s would hide nothing here."""
    body = json.dumps({"model": folder.name, "prompt": PROMPTS[0] * 12, "max_tokens": 500, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    parts = urlsplit(pair.url)
    for _ in range(3):
        with socket.create_connection((parts.hostname, parts.port)) as client:
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            time.sleep(after_s)
        until(lambda: not httpx.get(f"{pair.url}/deployment", timeout=60).json()["in_flight"], "nobody is inside", 10)
    until(lambda: not any(usage(pair)), "all blocks are free", 10)  # figures are taken once a second
