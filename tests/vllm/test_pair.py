"""Two engines: prefill and decode over transfer_with_insert, KV back, a killed peer; and routing by their KV events."""

from __future__ import annotations

import os
import random
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, CacheOracle, EngineProcess, ask, prompts
from ref_waiting import until

PREFILL, DECODE = (f"{role}-test-{os.getpid()}" for role in ("prefill", "decode"))
PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"


class Pair:
    """The prefill engine hands every prompt's KV to the decode engine, which gives the whole back at the end."""

    def __init__(self, tiny: Path) -> None:
        self._tiny = tiny
        self.ports = _free_ports(4)
        self.prefill = self._start(PREFILL, DECODE, "kv_producer", self.ports[:2])
        self.decode = self._start(DECODE, PREFILL, "kv_consumer", self.ports[2:])

    def restart_prefill(self) -> None:
        self.prefill.kill()
        self.prefill = self._start(PREFILL, DECODE, "kv_producer", self.ports[:2])

    def restart_decode(self) -> None:
        self.decode.kill()
        self.decode = self._start(DECODE, PREFILL, "kv_consumer", self.ports[2:])

    def reuse_resumes(self, source: Iterator[list[int]], plain: EngineProcess) -> None:
        """Some time after a restart; answers are right meanwhile."""

        def reused() -> bool:
            ids = next(source)
            (right,) = plain.generate(ask(ids, max_tokens=20))
            answer, _, cached = self.ask(ids, 20)
            assert answer == right["tokens"]
            return cached == (len(ids) - 1) // BLOCK * BLOCK

        until(reused, "reuse after a restart", 300)
        self.settled()

    def ask(self, ids: list[int], max_tokens: int) -> tuple[list[int], int, int]:
        """-> the whole answer, and the tokens cached at each engine"""
        (first,) = self.prefill.generate(ask(ids, max_tokens=1))
        (rest,) = self.decode.generate(ask(ids, max_tokens=max_tokens, params=first["params"]))
        assert rest["tokens"][: len(first["tokens"])] == first["tokens"]
        return rest["tokens"], first["cached"], rest["cached"]

    def settled(self) -> None:
        """Once nothing is under way, nothing is held."""
        for engine in (self.prefill, self.decode):
            until(lambda engine=engine: _held(engine) == (0, 0), "transfers end")  # type: ignore[misc]
            figures = engine.call("figures")
            assert (figures["tracks"], figures["steps"]) == (0, 0)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()

    def _start(self, name: str, peer: str, role: str, ports: list[int]) -> EngineProcess:
        events = {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{ports[0]}",
            "replay_endpoint": f"tcp://*:{ports[1]}",
        }  # fmt: skip
        pool = {"size": "64MiB", "name": name, "peers": {peer: f"shm://{peer}"}, "wait_s": 20.0}
        return EngineProcess(self._tiny, pool=pool, role=role, skip_tokenizer_init=True, kv_events_config=events)


@pytest.fixture(scope="module")
def pair(tiny: Path, plain: EngineProcess) -> Iterator[Pair]:
    made = Pair(tiny)
    yield made
    made.close()


def _held(engine: EngineProcess) -> tuple[int, int]:
    figures = engine.call("figures")
    return figures["leased"], figures["active"]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def test_kv_goes_to_the_decode_engine_and_comes_back(pair: Pair, plain: EngineProcess) -> None:
    oracle, source = CacheOracle(), prompts(20)
    history: list[int] = []
    unknown = known = 0  # whole blocks of the prompts that the decode engine had not, and had
    for turn in range(4):
        history += next(source)[:150]
        unknown += len(history) // BLOCK - known
        (right,) = plain.generate(ask(history, max_tokens=50))
        pair.prefill.call("reset")  # vLLM's own caches forget: what is found is the pool's
        pair.decode.call("reset")
        answer, at_prefill, at_decode = pair.ask(history, 50)
        assert answer == right["tokens"], turn
        assert at_decode == (len(history) - 1) // BLOCK * BLOCK, "all whole blocks of the prompt came"
        assert at_prefill == oracle.cached(history), "the answers of earlier turns came back"
        oracle.learn(history, answer)
        history += answer
        known = (len(history) - 1) // BLOCK
        pair.settled()
    assert pair.decode.call("figures")["traffic"]["arrived"] == 4
    assert pair.prefill.call("figures")["traffic"]["early_blocks"] == unknown, "prompts go over while they are computed"


def test_salted_kv_is_handed_over_apart(pair: Pair, plain: EngineProcess) -> None:
    ids = next(prompts(21))
    (right,) = plain.generate(ask(ids, max_tokens=20))
    whole = (len(ids) - 1) // BLOCK * BLOCK
    (first,) = pair.prefill.generate(ask(ids, max_tokens=1, salt="a"))
    (stranger,) = pair.decode.generate(ask(ids, max_tokens=20, salt="b", params=first["params"]))
    assert (stranger["tokens"], stranger["cached"]) == (right["tokens"], 0)
    (owner,) = pair.decode.generate(ask(ids, max_tokens=20, salt="a"))
    assert (owner["tokens"], owner["cached"]) == (right["tokens"], whole)
    (open_,) = pair.decode.generate(ask(ids, max_tokens=20))
    assert (open_["tokens"], open_["cached"]) == (right["tokens"], 0)


def test_a_storm_of_hand_overs_and_aborts(pair: Pair, plain: EngineProcess) -> None:
    rng, source = random.Random(30), prompts(30)
    bases = [next(source) for _ in range(4)]
    before = [engine.call("figures")["traffic"].get("ship_failed", 0) for engine in (pair.prefill, pair.decode)]
    waves = [
        [ask([*rng.choice(bases)[: rng.randrange(1, 40) * 8], *next(source)[:40]], max_tokens=1) for _ in range(40)]
        for _ in range(4)
    ]
    handed: list[dict[str, Any]] = []
    for number in range(len(waves) + 1):  # both engines work at once, the decode engine on the wave before
        if handed:
            pair.decode.send("storm", prompts=handed, seed=number, share=0.4)
        first = pair.prefill.call("storm", prompts=waves[number], seed=number, share=0.4) if number < len(waves) else []
        if handed:
            rest = pair.decode.answer()
            right = plain.generate(*[{**prompt, "params": None} for prompt in handed])
            whole = [(len(prompt["ids"]) - 1) // BLOCK * BLOCK for prompt in handed]
            for got, want, cached in zip(rest, right, whole, strict=True):
                assert got is None or (got["tokens"], got["cached"]) == (want["tokens"], cached)
        handed = [
            {**prompt, "max_tokens": 12, "params": one["params"]}
            for prompt, one in zip(waves[number] if first else [], first, strict=True)
            if one is not None
        ]
    pair.settled()
    for engine, failed in zip((pair.prefill, pair.decode), before, strict=True):
        assert engine.call("figures")["traffic"].get("ship_failed", 0) == failed, engine.log()[-4000:]


def test_the_scheduler_follows_the_events_of_both(pair: Pair) -> None:
    shared, other = next(prompts(22)) * 2, next(prompts(23)) * 2
    for engine in (pair.prefill, pair.decode):
        engine.call("reset")
    pair.prefill.generate(ask(shared, max_tokens=1))
    pair.decode.generate(ask(other, max_tokens=1))
    pair.decode.generate(ask(shared, max_tokens=1, salt="x"))
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert sum(1 for line in example.splitlines() if line.strip()) <= 40
    for number, port in zip(("5557", "5558", "5567", "5568"), pair.ports, strict=True):
        example = example.replace(number, str(port))
    space: dict[str, Any] = {}
    exec(compile(example, str(PAGE), "exec"), space)
    try:

        def routed(ids: list[int]) -> tuple[str, int]:
            space["subscriber"].poll(0.01)
            route = space["scheduler"].route([*ids, 5, 6, 7])
            space["scheduler"].failed(route.request_id)
            return route.prefill, route.cached_tokens

        for ids, name in ((shared, "vllm-0"), (other, "vllm-1")):
            expected = (name, len(ids) // BLOCK * BLOCK)
            until(lambda ids=ids, expected=expected: routed(ids) == expected, f"{name} is known to hold it")  # type: ignore[misc]
    finally:
        space["subscriber"].close()


def test_sigkill_of_the_prefill_engine(pair: Pair, plain: EngineProcess) -> None:
    source = prompts(24)
    ids, late = next(source), next(source)
    right = plain.generate(ask(ids, max_tokens=40), ask(late, max_tokens=40))
    (first,) = pair.prefill.generate(ask(ids, max_tokens=1))
    (hanging,) = pair.prefill.generate(ask(late, max_tokens=1))
    pair.prefill.kill()
    gone = {**hanging["params"], "tag": "00" * 12}  # KV that was announced and never sent
    got = pair.decode.generate(ask(ids, max_tokens=40, params=first["params"]), ask(late, max_tokens=40, params=gone))
    assert [one["tokens"] for one in got] == [one["tokens"] for one in right]
    pair.restart_prefill()
    pair.reuse_resumes(source, plain)


def test_sigkill_of_the_decode_engine(pair: Pair, plain: EngineProcess) -> None:
    source = prompts(25)
    asked = [ask(next(source), max_tokens=1) for _ in range(12)]
    right = plain.generate(*asked)
    pair.decode.ready()
    pair.prefill.send("generate", prompts=asked)
    pair.decode.kill()  # while KV is handed to it
    got = pair.prefill.answer()["answers"]
    assert [one["tokens"] for one in got] == [one["tokens"] for one in right]
    until(lambda: _held(pair.prefill) == (0, 0), "loans to the dead end")
    pair.restart_decode()
    pair.reuse_resumes(source, plain)
