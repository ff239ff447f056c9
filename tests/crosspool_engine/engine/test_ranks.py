"""Heads of one model spread over both attention ranks: the same tokens, the whole pool for one request, deaths."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ref_decode import ARCHITECTURES, NEW, decode, drive, greedy, halted, mixed, tokens_of

from poolweave.crosspool_engine import DecodeEngine, DecodeRequest, Serving
from poolweave.errors import ConfigError, WorkerLost

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(600)]
SPREAD = ("qwen3-moe", "mixtral", "llama", "qwen3")  # two KV heads; the others keep one latent
PROMPT = np.random.default_rng(5).integers(0, 199, 18).tolist()
Saved = dict[str, tuple[Any, str]]


def serve(engine: DecodeEngine, saved: Saved, replicas: tuple[tuple[int, ...], ...] | None) -> None:
    for name in SPREAD:
        engine.deactivate(name)
        engine.activate(name, Serving(path=saved[name][1], replicas=replicas))


@pytest.fixture
def spread(engine: DecodeEngine, saved: Saved) -> Iterator[DecodeEngine]:
    serve(engine, saved, ((0, 1),))
    yield engine
    engine.set_control(lowered=True, in_flight=2)
    serve(engine, saved, None)


def test_heads_over_two_ranks_decode_the_same_tokens_in_all_cells(
    spread: DecodeEngine, expected: dict[str, list[int]]
) -> None:
    """Beside models that lie on each rank whole."""
    for lowered, in_flight in ((True, 1), (True, 3), (False, 1), (False, 3)):
        spread.set_control(lowered=lowered, in_flight=in_flight)
        assert tokens_of(decode(spread, mixed())) == expected
    first = max(stage.start_ns for stage in spread.stages())
    decode(spread, [DecodeRequest(request_id="one", model="qwen3", tokens=[7], max_new_tokens=4)])
    stages = [stage for stage in spread.stages() if stage.start_ns > first and stage.worker.startswith("attention")]
    work = {worker: sum(stage.worker == worker for stage in stages) for worker in ("attention-0", "attention-1")}
    assert work == {"attention-0": 4 * 4, "attention-1": 4 * 3}  # the leader samples too


def test_one_request_sees_the_pools_of_both_ranks(spread: DecodeEngine, saved: Saved) -> None:
    """A token of llama's is 960 bytes of KV: 4 pages a rank hold 273 of them, both ranks' twice as many."""
    engine = spread
    many = [DecodeRequest(request_id=f"r{n}", model="llama", tokens=[7 + n], max_new_tokens=120) for n in range(4)]
    for request in many:
        engine.add(request)
    with halted(*engine.worker_pids()[2:]):  # so that none is over when the first step returns
        engine.step(0.0)
        assert (engine.stats().running, engine.stats().waiting) == (4, 0)  # 480 tokens of the 546 there are
    drive(engine)
    for n in range(4):
        assert engine.result(f"r{n}").tokens.tolist() == greedy(saved["llama"][0], [7 + n], 120)


def test_kv_comes_goes_and_is_found_again_over_two_ranks(spread: DecodeEngine, saved: Saved) -> None:
    engine, model = spread, saved["mixtral"][0]
    ask = {"model": "mixtral", "max_new_tokens": NEW, "return_kv": True}
    first = decode(engine, [DecodeRequest(request_id="1", tokens=PROMPT, **ask)])["1"]
    assert first.tokens.tolist() == greedy(model, PROMPT)
    assert first.kv is not None
    turn = [*PROMPT, *first.tokens.tolist(), 5, 6]
    second = decode(engine, [DecodeRequest(request_id="2", tokens=turn, **ask)])["2"]
    assert second.reused_tokens == 28
    assert second.tokens.tolist() == greedy(model, turn)
    assert second.kv is not None
    assert second.kv[:7].tobytes() == first.kv[:7].tobytes()
    engine.drop_history()
    brought = DecodeRequest(request_id="3", tokens=turn, kv=first.kv[:7], num_computed=28, **ask)
    third = decode(engine, [brought])["3"]
    assert third.reused_tokens == 0
    assert third.tokens.tolist() == second.tokens.tolist()
    assert third.kv is not None
    assert third.kv.tobytes() == second.kv.tobytes()


def check_death(engine: DecodeEngine, saved: Saved, expected: dict[str, list[int]], place: int) -> None:
    """SIGKILL of one of the two ranks while its models decode."""
    names = [f"{name}/{n}" for name in SPREAD for n in range(3)]
    for name in names:
        engine.add(DecodeRequest(request_id=name, model=name.split("/")[0], tokens=[7], max_new_tokens=90))
    while not engine.step():
        pass
    os.kill(engine.worker_pids()[place], signal.SIGKILL)
    engine.add(DecodeRequest(request_id="other", model="glm", tokens=[7], max_new_tokens=NEW))
    drive(engine)
    for name in names:
        got = engine.result(name)
        if got.finish_reason == "error":
            assert isinstance(got.error, WorkerLost)
        else:
            assert got.tokens.tolist() == greedy(saved[name.split("/")[0]][0], [7], 90)
    assert engine.result("other").tokens.tolist() == greedy(saved["glm"][0], [7], NEW)  # on the rank that lives
    assert set(engine.stats().lost) == set(SPREAD)
    engine.check()
    engine.restart()
    assert tokens_of(decode(engine, mixed())) == expected


@pytest.mark.parametrize("lowered", [True, False], ids=["lowered", "hosted"])
@pytest.mark.parametrize("place", [0, 1], ids=["leader", "follower"])
def test_sigkill_of_one_of_the_ranks(
    spread: DecodeEngine, saved: Saved, expected: dict[str, list[int]], place: int, lowered: bool
) -> None:
    spread.set_control(lowered=lowered, in_flight=2)
    check_death(spread, saved, expected, place)


def test_sigkill_while_the_other_rank_waits_for_it(spread: DecodeEngine, expected: dict[str, list[int]]) -> None:
    """Every batch has arrived at the living rank, and none can go on."""
    engine = spread
    for name in SPREAD:
        engine.add(DecodeRequest(request_id=name, model=name, tokens=[7], max_new_tokens=120))
    with halted(*engine.worker_pids()[2:]):  # so that none is over when the rank stops
        engine.step(0.0)  # their pages are mapped
        os.kill(engine.worker_pids()[1], signal.SIGSTOP)
    os.kill(engine.worker_pids()[1], signal.SIGKILL)
    drive(engine)
    assert all(isinstance(engine.result(name).error, WorkerLost) for name in SPREAD)
    engine.check()
    engine.restart()
    assert tokens_of(decode(engine, mixed())) == expected


def test_what_cannot_be_spread_is_refused(engine: DecodeEngine, saved: Saved) -> None:
    engine.deactivate("glm")
    with pytest.raises(ConfigError, match="1 KV heads do not divide over 2 attention ranks"):
        engine.activate("glm", Serving(path=saved["glm"][1], replicas=((0, 1),)))
    with pytest.raises(ConfigError, match="each once, of 2"):
        engine.activate("glm", Serving(path=saved["glm"][1], replicas=((0,), (0, 1))))
    engine.activate("glm", Serving(path=saved["glm"][1]))
    assert len(ARCHITECTURES) == len(engine.stats().models)
