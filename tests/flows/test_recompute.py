"""C23: KV that does not reach the decode instance, whatever block of it fails and however: it is computed again there,
the answer is a cold run's, and that is counted and logged once a request."""

from __future__ import annotations

import itertools
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ref_proxy import CLEAN, Fault, Proxy
from ref_transformers import greedy, prompt_of

from poolweave.mempool import MemPool, PoolConfig
from poolweave.serving.control.messages import Decode, Finished, Job, Prefilled, pack_tokens
from poolweave.serving.engine import EngineConfig, LoadedModel, SamplingParams, TorchEngine, load_model
from poolweave.serving.instance.decode_task import DecodeTask
from poolweave.serving.instance.granularity import Granularity, HandOverPolicy
from poolweave.serving.instance.tasks import PrefillTask, Task, Workplace
from poolweave.transfer import TransferConfig

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROMPT = prompt_of(5 * 16 + 3)
LENGTH = 5
GREETING = 600  # more bytes than the data connection's first answer has, fewer than a block
_names = itertools.count()


@dataclass
class Side:
    """An instance without its process: pool, engine, and what its tasks share."""

    pool: MemPool
    engine: TorchEngine
    workplace: Workplace

    def run(self, task: Task) -> list[int]:
        """Begin the task and compute its sequence; -> the tokens of its answer that were computed here."""
        sequence = task.begin()
        self.engine.add(sequence)
        answer: list[int] = []
        while not sequence.finished:
            for event in self.engine.step():
                assert event.token is not None
                if not answer:
                    task.prompt_computed()
                answer.append(event.token)
        return answer


@dataclass
class Caller:
    """Whom a task answers; it has all the time there is."""

    client: bytes = b""
    deadline: float | None = None
    replies: list[Any] = field(default_factory=list)

    def reply(self, message: Any) -> None:
        self.replies.append(message)


@pytest.fixture(scope="module")
def model(model_folder: Callable[[str], Path]) -> LoadedModel:
    return load_model(str(model_folder("llama")))


@contextmanager
def street(model: LoadedModel, fault: Fault, granularity: Granularity, lease_s: float) -> Iterator[tuple[Side, Side]]:
    """P and D over TCP, with a hostile proxy before P's data."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    proxy = Proxy(("127.0.0.1", port), down=fault)
    config: dict[str, Any] = {"lease_s": lease_s, "stall_s": min(lease_s, 20.0)}
    sender = TransferConfig(listen=f"tcp://127.0.0.1:{port}", advertise=f"tcp://127.0.0.1:{proxy.port}", **config)
    sides = []
    for transfer in (sender, TransferConfig(listen="tcp", **config)):
        name = f"recompute-{os.getpid()}-{next(_names)}"
        pool = MemPool(model.layout, instance=name, hbm="4MiB", config=PoolConfig(transfer=transfer))
        workplace = Workplace(pool, model.identity, 60.0, HandOverPolicy(pool.layout, granularity))
        sides.append(Side(pool, TorchEngine(model, pool, EngineConfig()), workplace))
    prefill, decode = sides
    prefill.pool.connect(decode.pool.instance, decode.pool.address)
    decode.pool.connect(prefill.pool.instance, prefill.pool.address)
    try:
        yield prefill, decode
        for side in sides:
            side.pool.check()
            assert side.pool.stats().tiers[next(iter(side.pool.stats().tiers))].active == 0
    finally:
        for side in sides:
            side.pool.close()
        proxy.close()


def ask(prefill: Side, decode: Side, flow: str, prompt: list[int], *, told: bool = True) -> tuple[list[int], Prefilled]:
    """One request through both; `told`: the decode instance hears from the request itself that no KV came."""
    sampling = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True)
    job = Job(request=f"r{next(_names)}", tokens=pack_tokens(prompt), flow=flow, sampling=sampling)
    first = PrefillTask(prefill.workplace, Caller(), job, decode.pool.instance)  # type: ignore[arg-type]
    answer = prefill.run(first)
    prefilled = first.end()
    first.release()
    request = Decode(job, answer[0], prefill.pool.instance, prefilled.lost if told else None)
    second = DecodeTask(decode.workplace, Caller(), request)  # type: ignore[arg-type]
    answer += decode.run(second)
    assert isinstance(second.end(), Finished)
    second.release()
    return answer, prefilled


@pytest.fixture(scope="module")
def cold(model_folder: Callable[[str], Path]) -> list[int]:
    return greedy(model_folder("llama"), tuple(PROMPT), LENGTH)


@pytest.mark.parametrize("granularity", ["by-request", "by-layer"])
def test_a_decode_instance_that_the_other_was_not_told_of_yet_computes_the_prompt(
    model: LoadedModel, cold: list[int], granularity: Granularity
) -> None:
    """The door heard of it first."""
    with street(model, CLEAN, granularity, 30.0) as (prefill, decode):
        prefill.pool.disconnect(decode.pool.instance)
        answer, prefilled = ask(prefill, decode, "pd-caching-3", PROMPT)
        assert answer == cold
        assert prefilled.sent_error is not None
        assert prefilled.sent_error.kind == "UnknownPeer"
        assert decode.workplace.recomputes.count == 1


@pytest.mark.parametrize(("flow", "told"), [("pd-basic", True), ("pd-caching-3", True), ("pd-caching-2", False)])
def test_whatever_block_is_corrupt_the_answer_is_a_cold_runs(
    model: LoadedModel, cold: list[int], caplog: pytest.LogCaptureFixture, flow: str, told: bool
) -> None:
    size = model.layout.block_bytes
    for block in range(model.layout.num_blocks(len(PROMPT))):
        fault = Fault("corrupt", GREETING + block * size)
        with street(model, fault, "by-request", 30.0) as (prefill, decode):
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                answer, prefilled = ask(prefill, decode, flow, PROMPT, told=told)
            assert answer == cold
            assert f"first block {block}" in (prefilled.lost or ""), prefilled.lost
            assert decode.workplace.recomputes.count == 1
            assert sum("computed again" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("kind", ["cut", "stall"])
@pytest.mark.parametrize("granularity", ["by-request", "by-layer"])
def test_a_transfer_that_ends_or_expires_is_recomputed(
    model: LoadedModel, cold: list[int], kind: str, granularity: Granularity
) -> None:
    """Also layer by layer, where the early hand-over fails first and then the whole one."""
    with street(model, Fault(kind, GREETING), granularity, 1.0) as (prefill, decode):
        answer, prefilled = ask(prefill, decode, "pd-caching-2", PROMPT)
        assert answer == cold
        assert prefilled.lost
        assert decode.workplace.recomputes.count == 1


def test_what_is_here_already_is_not_computed_again(model: LoadedModel, cold: list[int]) -> None:
    """The first turn's connection is clean, the second's is not: only the new tokens are computed at D."""
    with street(model, CLEAN, "by-request", 30.0) as (prefill, decode):
        assert ask(prefill, decode, "pd-caching-3", PROMPT)[0] == cold
        assert decode.workplace.recomputes.count == 0
        job = Job(
            request="late", tokens=pack_tokens(PROMPT), flow="pd-caching-3",
            sampling=SamplingParams(max_new_tokens=LENGTH, ignore_eos=True),
        )  # fmt: skip
        task = DecodeTask(decode.workplace, Caller(), Decode(job, cold[0], prefill.pool.instance, "it was lost"))  # type: ignore[arg-type]
        assert decode.run(task) == cold[1:]
        assert task.sequence is not None
        assert task.end().sent_error is None
        task.release()
        assert decode.workplace.recomputes.count == 1
