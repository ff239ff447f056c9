"""SIGKILL of any worker: it is reported, the other models go on, what was held comes back, restart works."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
from ref_decode import ARCHITECTURES, decode, drive, greedy, halted, mixed, tokens_of

from poolweave.crosspool_engine import DecodeEngine, DecodeRequest, FfnPlacement, Serving
from poolweave.errors import WorkerLost

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(600)]
NEW = 40


def place(engine: DecodeEngine, saved: dict[str, tuple[Any, str]], alone: str) -> None:
    """One model on FFN rank 1, all others on rank 0."""
    for name in ARCHITECTURES:
        engine.deactivate(name)
        engine.activate(name, Serving(path=saved[name][1], placement=FfnPlacement.by_layer([int(name == alone)] * 3)))


def ask(engine: DecodeEngine, names: Sequence[str]) -> None:
    for name in names:
        engine.add(DecodeRequest(request_id=name, model=name, tokens=[7], max_new_tokens=NEW))


def check_lost(engine: DecodeEngine, name: str) -> None:
    lost = engine.result(name)
    assert lost.finish_reason == "error"
    assert isinstance(lost.error, WorkerLost)
    assert lost.error.exit_code == -signal.SIGKILL


def check_restart(engine: DecodeEngine, expected: dict[str, list[int]]) -> None:
    """Blocks and pages came back; after a restart all is as before."""
    engine.check()
    with pytest.raises(WorkerLost):
        ask(engine, ["glm"])
    engine.restart()
    assert tokens_of(decode(engine, mixed())) == expected


def test_sigkill_of_workers_is_reported_others_go_on_and_one_restart_brings_all_back(
    engine: DecodeEngine, saved: dict[str, tuple[Any, str]], expected: dict[str, list[int]]
) -> None:
    """First an FFN rank: its model ends, the others go on. Then an attention rank: so do requests on the other one."""
    place(engine, saved, alone="glm")
    others = ("qwen3-moe", "deepseek-v2")
    doomed = engine.worker_pids()[3]
    os.kill(doomed, signal.SIGSTOP)  # so that its model is in its hands when it dies
    many = [f"glm{n}" for n in range(18)]  # more batches of it than can fly: some wait to start
    for name in many:
        engine.add(DecodeRequest(request_id=name, model="glm", tokens=[7], max_new_tokens=3))
    engine.step(0.0)
    os.kill(doomed, signal.SIGKILL)
    ask(engine, others)
    drive(engine)
    for name in many:
        check_lost(engine, name)
    for name in others:
        assert engine.result(name).tokens.tolist() == greedy(saved[name][0], [7], NEW)
    assert engine.stats().lost == ("glm",)
    engine.check()
    engine.set_control(lowered=False, in_flight=2)
    ask(engine, ("qwen3-moe", "deepseek-v2", "mixtral", "llama"))
    while not engine.step():
        pass  # until a first token: the host moves every stage, so that none is over yet
    os.kill(engine.worker_pids()[0], signal.SIGKILL)
    drive(engine)
    results = [engine.result(name) for name in ("qwen3-moe", "deepseek-v2", "mixtral", "llama")]
    assert sorted(result.finish_reason for result in results) == ["error", "error", "length", "length"]
    for result in results:
        if result.finish_reason == "length":
            assert result.tokens.tolist() == greedy(saved[result.request_id][0], [7], NEW)
    assert engine.stats().lost == ("glm",)  # the other attention rank has all models
    check_restart(engine, expected)


@pytest.mark.slow
def test_sigkill_of_an_ffn_rank_with_control_off(
    engine: DecodeEngine, saved: dict[str, tuple[Any, str]], expected: dict[str, list[int]]
) -> None:
    place(engine, saved, alone="glm")
    engine.set_control(lowered=False, in_flight=2)
    ask(engine, ARCHITECTURES[:3])
    told: set[str] = set()
    while "glm" not in told:
        told |= {news.request_id for news in engine.step()}
    os.kill(engine.worker_pids()[3], signal.SIGKILL)
    drive(engine)
    check_lost(engine, "glm")
    for name in ("qwen3-moe", "deepseek-v2"):
        assert engine.result(name).tokens.tolist() == greedy(saved[name][0], [7], NEW)
    check_restart(engine, expected)


@pytest.mark.slow
def test_sigkill_of_both_attention_ranks_with_lowering(engine: DecodeEngine, expected: dict[str, list[int]]) -> None:
    with halted(*engine.worker_pids()[2:]):  # every batch is at an FFN rank when the attention workers die
        ask(engine, ARCHITECTURES[:3])
        engine.step(0.0)
        for pid in engine.worker_pids()[:2]:
            os.kill(pid, signal.SIGKILL)
    drive(engine)
    for name in ARCHITECTURES[:3]:
        check_lost(engine, name)
    check_restart(engine, expected)


def test_a_worker_that_stands_still_is_ended_and_counts_as_dead(
    engine: DecodeEngine,
    saved: dict[str, tuple[Any, str]],
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("poolweave.crosspool_engine.worker_process._STOPPED_S", 0.2)
    place(engine, saved, alone="glm")
    os.kill(engine.worker_pids()[3], signal.SIGSTOP)
    ask(engine, ["glm", "qwen3-moe"])
    drive(engine)
    check_lost(engine, "glm")
    assert engine.result("qwen3-moe").tokens.tolist() == greedy(saved["qwen3-moe"][0], [7], NEW)
    check_restart(engine, expected)


@pytest.mark.parametrize("number", [1, 3], ids=["attention", "ffn"])
def test_an_order_to_a_worker_that_stands_still_is_not_waited_for_for_ever(
    engine: DecodeEngine,
    saved: dict[str, tuple[Any, str]],
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    """Nothing runs: the order is the first that it should hear."""
    monkeypatch.setattr("poolweave.crosspool_engine.worker_process._STOPPED_S", 0.2)
    pid = engine.worker_pids()[number]
    os.kill(pid, signal.SIGSTOP)
    engine.deactivate("glm")
    assert engine.has_lost_workers
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    engine.restart()
    engine.activate("glm", Serving(path=saved["glm"][1]))
    assert tokens_of(decode(engine, mixed())) == expected
