"""Ten minutes of kills and stops over a deployment with a real engine; and a client that goes away from one."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from ref_instance import until
from ref_storm import Storm
from ref_transformers import greedy, save_random_model, save_tokenizer

from poolweave.config import from_mapping
from poolweave.serving.deployment import Deployment, DeploymentConfig
from poolweave.serving.door.prompter import load_prompter

pytestmark = [pytest.mark.multiproc, pytest.mark.engine, pytest.mark.slow]
ROLES = ("prefill", "decode", "colocated")
PROMPTS = [[50 + n, 60, 70 + n, 80] * (8 + n) for n in range(4)]
STORM_S = float(os.environ.get("POOLWEAVE_STORM_S", "600"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose vocabulary is its tokenizer's."""
    return save_tokenizer(save_random_model("llama", tmp_path_factory.mktemp("models") / "llama", vocab_size=260))


def deploy(folder: Path, *roles: str) -> Deployment:
    mapping: dict[str, Any] = {
        "model": str(folder),
        "membership": {"ttl_s": 5.0, "heartbeat_s": 0.5},
        "door": {"listen": "127.0.0.1:0", "wait_s": 60.0, "timeout_s": 110.0, "attempts": 20},
        "instances": [
            {"name": f"{role}-{os.getpid()}", "role": role, "hbm": "24MiB", "lease_s": 20.0} for role in roles
        ],
    }
    return Deployment(from_mapping(mapping, DeploymentConfig))


@pytest.mark.timeout(STORM_S + 900)
def test_ten_minutes_of_kills_and_stops_leave_every_answer_right(folder: Path) -> None:
    prompter = load_prompter(str(folder))

    def right(which: int, length: int) -> str:
        stream = prompter.stream(PROMPTS[which])
        for token in greedy(folder, tuple(PROMPTS[which]), 20)[:length]:
            stream.append(token)
        stream.flush()
        return stream.text

    before, others = psutil.Process().num_fds(), set(psutil.Process().children(recursive=True))
    with deploy(folder, *ROLES) as deployment:
        storm = Storm(deployment, folder.name, right, PROMPTS)
        storm.blow(STORM_S, seed=7, pause_s=(3.0, 15.0))
        storm.heal(len(ROLES))
        assert not storm.wrong, storm.wrong[:3]
        assert storm.seen["answered"] > 0, storm.seen
    assert set(psutil.Process().children(recursive=True)) <= others
    until(lambda: psutil.Process().num_fds() <= before, "its descriptors are closed")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Deployment]:
    with deploy(folder, "prefill", "decode") as made:
        until(lambda: httpx.get(f"{made.url}/ready").status_code == 200, "it is ready")
        yield made


def usage(deployment: Deployment) -> list[float]:
    found = httpx.get(f"{deployment.url}/deployment").json()["instances"]
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
        until(lambda: not httpx.get(f"{pair.url}/deployment").json()["in_flight"], "nobody is inside", 10)
    until(lambda: not any(usage(pair)), "all blocks are free", 10)  # figures are taken once a second
