"""An engine whose second FFN rank is served by another process over TCP, as on another host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from ref_decode import BUDGET, PAGE, decode, drive, mixed, tokens_of

from poolweave.crosspool_engine import DecodeEngine, DecodeRequest, EngineConfig, FfnPlacement, ModelShape, Serving
from poolweave.errors import WorkerLost

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(900)]
MODELS = ("mixtral", "llama")


@pytest.fixture
def ffn_host() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "poolweave.crosspool_engine.ffn_host"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)


def config(host: str) -> EngineConfig:
    return EngineConfig(
        kv_budget=BUDGET, page_bytes=PAGE, ffn_ranks=2, ffn_hosts=(host,), max_models=2, max_tokens=128, max_hidden=128,
        block_tokens=4, max_batch=3, in_flight=4,
    )  # fmt: skip


def children_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


def test_a_rank_elsewhere_decodes_the_same_tokens_and_its_death_is_noticed(
    ffn_host: subprocess.Popen[str], saved: dict[str, tuple[Any, str]], expected: dict[str, list[int]]
) -> None:
    requests = [request for request in mixed() if request.model in MODELS]
    want = {request.request_id: expected[request.request_id] for request in requests}
    assert ffn_host.stdout is not None
    with DecodeEngine(config(ffn_host.stdout.readline().strip())) as engine:
        for name in MODELS:
            path = saved[name][1]
            placement = FfnPlacement.by_expert(ModelShape.from_directory(path), 2)
            if name == "llama":
                placement = FfnPlacement.by_layer([1, 0, 1])
            engine.activate(name, Serving(path=path, placement=placement))
        for lowered, in_flight in ((True, 1), (True, 2), (True, 4), (False, 1), (False, 2)):
            engine.set_control(lowered=lowered, in_flight=in_flight)
            assert tokens_of(decode(engine, requests)) == want
        engine.deactivate("llama")
        engine.activate("llama", Serving(path=saved["llama"][1], placement=FfnPlacement.by_layer([0, 0, 0])))
        (session,) = children_of(ffn_host.pid)
        os.kill(session, signal.SIGSTOP)  # so that its model is in its hands when it dies
        engine.add(DecodeRequest(request_id="lost", model="mixtral", tokens=[7], max_new_tokens=100))
        engine.add(DecodeRequest(request_id="goes on", model="llama", tokens=[7], max_new_tokens=20))
        engine.step(0.0)
        os.kill(session, signal.SIGKILL)
        drive(engine)
        assert isinstance(engine.result("lost").error, WorkerLost)
        assert len(engine.result("goes on").tokens) == 20
        engine.restart()
        assert tokens_of(decode(engine, requests)) == want
