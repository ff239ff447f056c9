"""One engine with a pool, and a pool process beside it: reuse, identities, failures, aborts, restarts."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, FOR_EVER, CacheOracle, EngineProcess, ask, prompts
from ref_waiting import until

from poolweave.serving.pool_process.service import PoolServiceConfig
from poolweave.serving.process.child import Child, Program

NAME = f"reuse-test-{os.getpid()}"


def keeper() -> Child:
    child = Child(Program(NAME, "poolweave.serving.pool_process.service", PoolServiceConfig(name=NAME, size="256MiB")))
    child.wait_ready(60)
    return child


def start(tiny: Path, adapters: dict[str, str]) -> EngineProcess:
    return EngineProcess(
        tiny, pool={"size": "64MiB", "pool": NAME, "wait_s": FOR_EVER}, enable_lora=True, max_loras=2, max_lora_rank=8,
        adapters=adapters, skip_tokenizer_init=True,
    )  # fmt: skip


class House:
    """The engine under test and the pool process; the former may be killed and started again."""

    def __init__(self, tiny: Path, adapters: dict[str, str]) -> None:
        self._made = tiny, adapters
        self.keeper = keeper()
        self.engine = start(tiny, adapters)

    def restart_engine(self) -> None:
        self.engine.kill()
        self.engine = start(*self._made)

    def shipped(self) -> None:
        """Wait until nothing is under way to the pool process."""
        until(lambda: self.engine.call("figures")["leased"] == 0, "transfers end")

    def keep(self, ids: list[int], max_tokens: int) -> list[int]:
        """Generate until the pool process has taken it: it may be away for a moment on a machine that stood still."""
        answer: list[int] = []

        def kept() -> bool:
            before = self.engine.call("figures")["traffic"].get("shipped", 0)
            answer[:] = self.engine.generate(ask(ids, max_tokens=max_tokens))[0]["tokens"]
            self.shipped()
            return int(self.engine.call("figures")["traffic"].get("shipped", 0)) > before

        until(kept, "the pool process keeps what the engine sends")
        return answer

    def close(self) -> None:
        self.engine.close()
        self.keeper.close()


@pytest.fixture(scope="module")
def house(tiny: Path, adapters: dict[str, str], plain: EngineProcess) -> Iterator[House]:
    made = House(tiny, adapters)
    yield made
    made.close()


@pytest.fixture
def idle(house: House) -> Iterator[None]:
    """After the test nothing is held, on vLLM's side or ours."""
    before = house.engine.call("figures")["free"]
    yield
    house.shipped()
    figures = house.engine.call("figures")
    assert (figures["active"], figures["tracks"], figures["steps"]) == (0, 0, 0)
    assert figures["free"] == before


def same_as_plain(house: House, plain: EngineProcess, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    got = house.engine.generate(*asked)
    right = plain.generate(*[{key: value for key, value in prompt.items() if key != "params"} for prompt in asked])
    assert [one["tokens"] for one in got] == [one["tokens"] for one in right]
    return got


def test_cold_warm_partly_warm_and_forgotten_by_vllm(house: House, plain: EngineProcess, idle: None) -> None:
    rng, source, oracle = random.Random(1), prompts(1), CacheOracle()
    known: list[list[int]] = []
    for round_ in range(24):
        kind = rng.choice(("new", "again", "longer", "cut")) if known else "new"
        ids = next(source) if kind == "new" else list(rng.choice(known))
        if kind == "longer":
            ids = [*ids, *next(source)][:1500]
        elif kind == "cut":
            ids = [*ids[: rng.randrange(1, len(ids))], *next(source)[:40]]
        (got,) = same_as_plain(house, plain, [ask(ids, max_tokens=rng.choice((1, 8, 40)))])
        assert got["cached"] == oracle.cached(ids), kind
        oracle.learn(ids, got["tokens"])
        known.append([*ids, *got["tokens"]])
        if round_ % 3 == 2:
            assert house.engine.call("reset")
    assert house.engine.call("figures")["counters"]["loaded"] > 20


def test_many_at_once(house: House, plain: EngineProcess, idle: None) -> None:
    base = next(prompts(2))
    asked = [ask([*base, *ids[:30]], max_tokens=12) for ids in itertools.islice(prompts(3), 8)]
    same_as_plain(house, plain, asked)
    house.engine.call("reset")
    warm = same_as_plain(house, plain, asked)
    oracle = CacheOracle()
    for one in asked:
        oracle.learn(one["ids"], [0])
    assert [one["cached"] for one in warm] == [oracle.cached(one["ids"]) for one in asked]


def test_salts_and_adapters_are_apart(house: House, plain: EngineProcess, idle: None) -> None:
    ids = next(prompts(4))
    whole = (len(ids) - 1) // BLOCK * BLOCK
    kinds: list[dict[str, Any]] = [{}, {"salt": "x"}, {"salt": "y"}, {"lora": "first"}, {"lora": "second"},
                                   {"lora": "first", "salt": "x"}]  # fmt: skip
    for kind in kinds:
        (got,) = same_as_plain(house, plain, [ask(ids, **kind)])
        assert got["cached"] == 0, kind
    other = [*ids, *ids]
    for kind in reversed(kinds):  # the other way round: what is salted comes first
        (got,) = same_as_plain(house, plain, [ask(other[7:], **kind)])
        assert got["cached"] == 0, kind
    house.engine.call("reset")
    for kind in kinds:
        (got,) = same_as_plain(house, plain, [ask(ids, **kind)])
        assert got["cached"] == whole, kind
    answers = {tuple(one["tokens"]) for kind in kinds for one in plain.generate(ask(ids, **kind))}
    assert len(answers) == 3, "the adapters change the answer"


def test_a_load_that_fails_is_computed_at_every_block(house: House, plain: EngineProcess, idle: None) -> None:
    ids = next(prompts(5))[:200]
    ids += next(prompts(6))[: 200 - len(ids)]
    same_as_plain(house, plain, [ask(ids)])
    for position in range((len(ids) - 1) // BLOCK):
        house.engine.call("reset")
        house.engine.call("fail_load", position=position)
        same_as_plain(house, plain, [ask(ids)])
    house.engine.call("reset")
    (got,) = same_as_plain(house, plain, [ask(ids)])
    assert got["cached"] == (len(ids) - 1) // BLOCK * BLOCK


def test_500_aborts_leave_no_pin(house: House, plain: EngineProcess, idle: None) -> None:
    house.engine.call("abort_many", seed=1, count=500)
    same_as_plain(house, plain, [ask(next(prompts(7)))])


def test_a_restarted_engine_finds_what_the_pool_process_keeps(house: House, plain: EngineProcess) -> None:
    source, oracle = prompts(9), CacheOracle()
    kept = []
    for _ in range(3):
        ids = next(source)
        answer = house.keep(ids, 40)
        oracle.learn(ids, answer)
        kept.append([*ids, *answer])
    house.restart_engine()
    (other,) = same_as_plain(house, plain, [ask(kept[0], salt="x")])
    assert other["cached"] == 0
    came = []
    for longer in kept:
        (again,) = same_as_plain(house, plain, [ask(longer)])
        came.append((again["cached"], oracle.cached(longer)))
    assert all(cached == most for cached, most in came), (came, house.engine.log()[-2000:])
    assert house.engine.call("figures")["traffic"]["arrived"] == len(kept)


def test_reset_of_the_connector_forgets(house: House, plain: EngineProcess, idle: None) -> None:
    """Last: what the engine computes from here on is kept under a revision of its own, which no other engine finds."""
    ids = next(prompts(8))
    same_as_plain(house, plain, [ask(ids)])
    assert house.engine.call("forget")
    assert same_as_plain(house, plain, [ask(ids)])[0]["cached"] == 0
