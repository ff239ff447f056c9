"""The two sides of the connector against a model of vLLM's scheduler: hits, identities, failures, aborts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ref_vllm_engine import PAGE, Request
from vllm_house import House

from poolweave.errors import PoolweaveError
from poolweave.index import Identity
from poolweave.integrations.vllm._native import swap_planes


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.idle()
    made.scheduler.close()


def test_whole_blocks_of_prompt_and_answer_are_found_again(house: House) -> None:
    prompt = list(range(21))
    cold = house.run(prompt, 12)
    assert cold.cached == 0
    warm = house.run(prompt, 12)
    assert warm.cached == 20
    assert warm.output == cold.output
    longer = house.run(prompt + cold.output + [7, 7], 3)
    assert longer.cached == 32  # of 32 tokens with KV: the last answer token had none
    assert house.run(prompt[:10] + [40] * 10).cached == 8
    assert house.run(prompt[:20]).cached == 16, "one token is left to compute"


def test_other_identities_never_hit(house: House) -> None:
    prompt = list(range(20))
    image = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=2, length=4))
    moved = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=6, length=4))
    lora = SimpleNamespace(lora_int_id=1, lora_name="a", lora_path="/a")
    other = SimpleNamespace(lora_int_id=2, lora_name="a", lora_path="/a")
    kinds: list[dict[str, Any]] = [
        {}, {"cache_salt": "x"}, {"cache_salt": "y"}, {"cache_salt": ""}, {"lora_request": lora},
        {"lora_request": other}, {"lora_request": lora, "cache_salt": "x"}, {"mm_features": (image,)},
        {"mm_features": (moved,)},
    ]  # fmt: skip
    assert [house.run(prompt, **kind).cached for kind in kinds] == [0] * len(kinds)
    assert [house.run(prompt, **kind).cached for kind in kinds] == [16] * len(kinds)


def test_forget_leaves_nothing_to_find(house: House) -> None:
    prompt = list(range(20))
    house.run(prompt)
    running = house.request([*prompt, 1, 2, 3], 30)
    house.engine.add(running)
    house.engine.step()
    house.scheduler.forget()
    while running.status.name == "RUNNING":
        house.engine.step()
    assert house.run(prompt).cached == 0
    assert house.run(prompt).cached == 16


def test_requests_without_token_ids_or_with_a_pooler_are_left_alone(house: House) -> None:
    for more in ({"prompt_token_ids": None}, {"pooling_params": object()}):
        request = SimpleNamespace(**{"prompt_token_ids": [1] * 20, "pooling_params": None, "request_id": "p", **more})
        assert house.scheduler.lookup(request, 0) == 0
        assert house.scheduler.finished(request) is None


def test_a_load_that_fails_at_any_block_is_computed_anew() -> None:
    bad: set[int] = set()

    def copy(sources: Any, targets: Any, froms: Any, tos: Any) -> None:
        if bad.intersection(froms.tolist()) and loading[0]:
            raise PoolweaveError("this block cannot be read")
        swap_planes(sources, targets, froms, tos, PAGE * 4, 1)

    loading = [False]
    house = House(copy=copy)
    load = house.worker.load

    def watched() -> None:
        loading[0] = True
        load()
        loading[0] = False

    house.worker.load = watched  # type: ignore[method-assign]
    prompt = list(range(24))
    cold = house.run(prompt, 6)
    with house.pool.match(prompt) as hit:
        assert hit.num_tokens == 0, "of the default identity"
    ns = house.pool.namespace(Identity(model="m"))
    with house.pool.match(prompt[:20], ns) as hit:
        rows = house.pool.slots(hit.blocks).tolist()
    for row in rows:
        bad.add(row)
        again = house.run(prompt, 6)
        assert again.output == cold.output
        bad.clear()
        assert house.run(prompt, 6).output == cold.output
        house.idle()
    house.scheduler.close()


def test_a_pool_that_is_full_of_running_requests_saves_less_and_says_so() -> None:
    house = House(blocks=4)
    request = house.run(list(range(30)), 8)
    assert len(request.output) == 8
    assert house.scheduler.counters["skipped"] > 0
    house.idle()
    house.scheduler.close()


def test_memory_that_cannot_be_mapped_costs_the_reuse_and_nothing_else(house: House) -> None:
    prompt = list(range(20))
    cold = house.run(prompt)
    window = house.scheduler._window
    house.scheduler._window = type(window)(window.pid, 10**6, window.nbytes, window.row_bytes, window.plane_bytes)
    assert house.run(prompt).output == cold.output
    house.scheduler._window = window
    assert house.run(prompt).cached == 16


@pytest.mark.parametrize(
    ("seed", "aborts"), [(0, 100), *(pytest.param(seed, 500, marks=pytest.mark.slow) for seed in range(1, 6))]
)
def test_random_aborts_and_preemptions_leave_no_pin(seed: int, aborts: int) -> None:
    rng = random.Random(seed)
    house = House(blocks=40, pages=24)
    live: list[Request] = []
    aborted = 0
    while aborted < aborts:
        if len(live) < 6 and rng.random() < 0.6:
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
            salt = rng.choice([None, None, "s"])
            live.append(house.request(prompt, rng.randrange(1, 12), cache_salt=salt))
            house.engine.add(live[-1])
        elif live and rng.random() < 0.7:
            house.engine.abort(live.pop(rng.randrange(len(live))))
            aborted += 1
        elif house.engine.running and rng.random() < 0.2:
            house.engine.preempt(rng.choice(house.engine.running))
        for ended in house.engine.step():
            live.remove(ended)
        if rng.random() < 0.02:
            house.pool.check()
    for request in live:
        house.engine.abort(request)
    house.idle()
    assert sorted(house.engine.free) == list(range(24))
    house.scheduler.close()
