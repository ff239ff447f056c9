"""Instances with a real engine that are killed: who follows them, under which lease, and that answers stay right."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from ref_transformers import greedy, save_random_model, save_tokenizer
from ref_waiting import until
from ref_whole import Whole, members

from poolweave.config import from_mapping
from poolweave.serving.deployment import Deployment, DeploymentConfig
from poolweave.serving.door.prompter import load_prompter

pytestmark = [pytest.mark.multiproc, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]
PROMPT = [50, 60, 70, 80] * 12
KINDS = ("prefill", "decode", "colocated", "crosspool")


def name(kind: str) -> str:
    return f"{kind}-{os.getpid()}-r" if kind in KINDS else kind


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_random_model("mixtral", tmp_path_factory.mktemp("models") / "mixtral", vocab_size=260))


@pytest.fixture(scope="module")
def deployment(folder: Path) -> Iterator[Deployment]:
    """One instance of each kind, under the default membership."""
    pools = {"kv_budget": "8MiB", "max_tokens": 512, "max_batch": 2}
    instances: list[dict[str, Any]] = [{"name": name(kind), "role": kind, "hbm": "16MiB"} for kind in KINDS[:3]]
    crosspool = {"name": name("crosspool"), "role": "decode", "kind": "crosspool", "hbm": "16MiB", "crosspool": pools}
    mapping = {
        "models": [{"name": "mixtral", "path": str(folder)}],
        "door": {"listen": "127.0.0.1:0", "wait_s": 60.0},
        "instances": [*instances, crosspool],
    }
    others = set(psutil.Process().children(recursive=True))
    with Deployment(from_mapping(mapping, DeploymentConfig)) as made:
        yield made
    assert set(psutil.Process().children(recursive=True)) <= others


def right(folder: Path) -> str:
    stream = load_prompter(str(folder)).stream(PROMPT)
    for token in greedy(folder, tuple(PROMPT), 8):
        stream.append(token)
    stream.flush()
    return stream.text


def waiting(deployment: Deployment) -> set[int]:
    """The two that follow those who die."""
    spares = deployment.spares
    assert spares is not None
    until(lambda: len(spares.pids) == 2, "two wait")
    return set(spares.pids)


def answers_rightly(deployment: Deployment, folder: Path) -> bool:
    body = {"model": "mixtral", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{deployment.url}/v1/completions", json=body, timeout=120)
    return bool(answer.json()["choices"][0]["text"] == right(folder))


@pytest.mark.parametrize(
    "kinds",
    [
        *[(kind,) for kind in ("coordinator", "door", *KINDS)],
        ("prefill", "decode"),
        ("decode", "crosspool"),
        ("coordinator", "decode"),
        KINDS,
        ("coordinator", "door", *KINDS),
    ],
    ids="+".join,
)
def test_whoever_is_killed_the_deployment_is_whole_again(
    deployment: Deployment, folder: Path, kinds: tuple[str, ...]
) -> None:
    spares = deployment.spares
    assert spares is not None
    before, given, whole = waiting(deployment), spares.given, Whole(deployment)
    whole.kill(name(kind) for kind in kinds)
    until(whole.again, f"{kinds} are back")
    new = {deployment.pids[name(kind)] for kind in kinds if kind in KINDS}
    assert len(new & before) == min(2, len(new)), "who waited have followed them"
    assert spares.given == given + min(2, len(new))
    untouched = [one for one in whole.members if one.partition(".")[0] not in whole.killed]
    now = members(deployment)
    assert all(now[one].epoch == whole.members[one].epoch for one in untouched), "nobody else lost its lease"
    assert answers_rightly(deployment, folder)


@pytest.mark.parametrize("kind", ["coordinator", "door", *KINDS])
def test_whoever_stands_still_is_replaced_and_the_deployment_is_whole_again(
    deployment: Deployment, folder: Path, kind: str
) -> None:
    whole = Whole(deployment)
    whole.kill([name(kind)], signal.SIGSTOP)
    until(whole.again, f"{kind} is another process")
    assert answers_rightly(deployment, folder)


def test_those_that_die_before_the_next_spares_are_there_come_back_by_themselves(deployment: Deployment) -> None:
    waiting(deployment)
    for _ in range(3):
        whole = Whole(deployment)
        whole.kill([name("prefill"), name("decode")])
        until(whole.again, "both are back")
    waiting(deployment)
