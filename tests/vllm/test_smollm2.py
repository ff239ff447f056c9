"""A real model: SmolLM2-135M-Instruct, thirty layers, three KV heads, answers that mean something."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from engines import BLOCK, FOR_EVER, CacheOracle, EngineProcess, ask
from ref_waiting import until

from poolweave.serving.engine.smollm2 import smollm2_directory
from poolweave.serving.pool_process.service import PoolServiceConfig
from poolweave.serving.process.child import Child, Program

TEXT = (
    "The library of the old town stands at the river. Its oldest book was copied by hand eight hundred years ago, and "
    "nobody knows who wrote it. Every spring the doors are opened for a week and people come from far away to see it. "
)
QUESTIONS = ("What stands at the river?", "When are the doors opened?", "Who wrote the oldest book?")


KEEPER, FIRST, SECOND = (f"{name}-smollm2-{os.getpid()}" for name in ("keeper", "first", "second"))


class House:
    """vLLM alone; two engines that are each other's peers; and a pool process, which the first one uses."""

    def __init__(self) -> None:
        self.keeper = Child(Program(
            KEEPER, "poolweave.serving.pool_process.service", PoolServiceConfig(name=KEEPER, size="512MiB")
        ))  # fmt: skip
        self.keeper.wait_ready(60)
        self.alone = EngineProcess(smollm2_directory(), skip_tokenizer_init=True, enable_prefix_caching=False)
        self.first = self.start(FIRST, SECOND, pool=KEEPER)
        self.second = self.start(SECOND, FIRST)

    def start(self, name: str, peer: str, **more: Any) -> EngineProcess:
        pool = {"size": "256MiB", "name": name, "peers": {peer: f"shm://{peer}"}, "wait_s": FOR_EVER, **more}
        return EngineProcess(smollm2_directory(), skip_tokenizer_init=True, pool=pool)

    def settled(self) -> None:
        for engine in (self.first, self.second):
            until(lambda engine=engine: engine.call("figures")["leased"] == 0, "transfers end")  # type: ignore[misc]

    def close(self) -> None:
        for one in (self.alone, self.first, self.second, self.keeper):
            one.close()


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()


def conversations() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_directory())
    asked = [[{"role": "user", "content": TEXT * 3 + question}] for question in QUESTIONS]
    told = [tokenizer.apply_chat_template(one, add_generation_prompt=True)["input_ids"] for one in asked]
    return [[int(token) for token in ids] for ids in told]


def test_answers_are_vllms_own_cold_warm_and_partly_warm(house: House) -> None:
    alone, pooled = house.alone, house.first
    prompts = [ask(ids, max_tokens=24) for ids in conversations()]
    right = [one["tokens"] for one in alone.generate(*prompts)]
    cold = [pooled.generate(prompt)[0] for prompt in prompts]
    assert [one["tokens"] for one in cold] == right
    assert cold[0]["cached"] == 0
    assert cold[1]["cached"] >= BLOCK, "the questions share a text"
    pooled.call("reset")
    warm = pooled.generate(*prompts)
    assert [one["tokens"] for one in warm] == right
    assert [one["cached"] for one in warm] == [(len(prompt["ids"]) - 1) // BLOCK * BLOCK for prompt in prompts]
    turn = [ask([*prompt["ids"], *answer], max_tokens=12) for prompt, answer in zip(prompts, right, strict=True)]
    pooled.call("reset")
    assert [one["tokens"] for one in pooled.generate(*turn)] == [one["tokens"] for one in alone.generate(*turn)]
    house.settled()
    assert pooled.call("figures")["active"] == 0


def test_answers_are_vllms_own_over_a_pair_and_a_restart(house: House) -> None:
    def said(ids: list[int], **more: Any) -> dict[str, Any]:
        return ask(ids, salt="a tenant of its own", **more)

    oracle, histories = CacheOracle(), conversations()
    for position, ids in enumerate(histories):
        for engine in (house.first, house.second):
            engine.call("reset")
        (right,) = house.alone.generate(said(ids, max_tokens=24))
        (first,) = house.first.generate(said(ids, max_tokens=1, params={"send_to": SECOND}))
        assert first["cached"] == oracle.cached(ids)
        (rest,) = house.second.generate(said(ids, max_tokens=24, params=first["params"]))
        assert (rest["tokens"], rest["cached"]) == (right["tokens"], (len(ids) - 1) // BLOCK * BLOCK)
        oracle.learn(ids, rest["tokens"])
        house.settled()
        histories[position] = [*ids, *rest["tokens"]]
    turns = [said(ids, max_tokens=12) for ids in histories]
    right_turns = [one["tokens"] for one in house.alone.generate(*turns)]
    known = [oracle.cached(ids) for ids in histories]
    back = house.first.generate(*turns)
    assert [one["tokens"] for one in back] == right_turns
    assert [one["cached"] for one in back] == known, "the answers' KV came back"
    house.settled()
    house.first.kill()
    house.first = house.start(FIRST, SECOND, pool=KEEPER)
    again = house.first.generate(*turns)
    assert [one["tokens"] for one in again] == right_turns
    assert [one["cached"] for one in again] == known, house.first.log()[-2000:]
