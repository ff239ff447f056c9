"""A death under way: the answer goes on elsewhere, token for token, or fails with the right status."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from ref_door import World
from ref_instance import answer_of
from ref_waiting import until
from ref_words import text_of

from poolweave.errors import PoolweaveError, RequestRefused
from poolweave.serving.door.dispatch import _ELSEWHERE
from poolweave.types import Role

PROMPT = [50, 60, 70, 80]


def text_in(answer: object) -> str:
    return str(answer.json()["choices"][0]["text"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("roles", [(Role.COLOCATED,) * 2, (Role.PREFILL, Role.DECODE, Role.DECODE)], ids=["one", "pd"])
def test_an_answer_goes_on_where_its_instance_died(make_world: Callable[..., World], roles: tuple[Role, ...]) -> None:
    """Half of it was streamed already: the client sees one answer without a seam."""
    world = make_world(*roles)
    generating = roles[-1]
    for thread in world.instances.values():
        thread.instance.token_s = 0.002 if thread.instance.config.role is generating else 0.0
    right = text_of(answer_of(PROMPT, 200))
    with world.client.stream(
        "POST", "/v1/completions", json={"model": world.model, "prompt": PROMPT, "max_tokens": 200, "stream": True}
    ) as answer:
        seen = ""
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            seen += json.loads(line[6:])["choices"][0]["text"]
            if len(seen) == 10:
                (name,) = (name for name, thread in world.instances.items() if thread.instance.running)
                world.instances.pop(name).close()
    assert seen == right
    assert world.client.get("/deployment").json()["retried"] == 1
    until(lambda: world.usable == len(roles) - 1, "the dead one is forgotten")


@pytest.mark.parametrize("stops_after", [3, 0], ids=["stop", "length"])
@pytest.mark.parametrize("roles", [(Role.COLOCATED,) * 2, (Role.PREFILL, Role.DECODE, Role.DECODE)], ids=["one", "pd"])
def test_an_answer_whose_last_token_came_goes_on_nowhere(
    make_world: Callable[..., World], roles: tuple[Role, ...], stops_after: int
) -> None:
    """Its instance died before it said that the answer is over: another one would answer on past its end."""
    world = make_world(*roles, attempts=1)
    for thread in world.instances.values():
        thread.instance.mute, thread.instance.stops_after = True, stops_after
    count = 5 if not stops_after else stops_after + (roles[-1] is Role.DECODE)  # the first token is the prefill's
    with world.client.stream(
        "POST", "/v1/completions", json={"model": world.model, "prompt": PROMPT, "max_tokens": 5, "stream": True}
    ) as answer:
        seen, reasons = "", []
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            seen += choice["text"]
            reasons.append(choice["finish_reason"])
            if len(seen) == count and reasons[-1] is None:
                (name,) = (
                    name for name, thread in world.instances.items()
                    if thread.instance.config.role is roles[-1] and thread.instance.log
                )  # fmt: skip
                world.instances.pop(name).close()
    assert seen == text_of(answer_of(PROMPT, count))
    assert [reason for reason in reasons if reason] == ["stop" if stops_after else "length"]
    assert world.client.get("/deployment").json()["retried"] == 0


@pytest.mark.parametrize("kind", _ELSEWHERE)
def test_what_another_instance_may_do_better_is_tried_again(
    make_world: Callable[..., World], kind: type[PoolweaveError]
) -> None:
    error = kind("x")
    world = make_world(Role.COLOCATED, attempts=3)
    instance = world.instances["colocated-0"].instance
    instance.failures = [error] * 2
    assert text_in(world.post(prompt=PROMPT, max_tokens=5)) == text_of(answer_of(PROMPT, 5))
    instance.failures = [error] * 3
    answer = world.post(prompt=PROMPT, max_tokens=5)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1


def test_what_no_instance_can_do_is_not_tried_again(world: World) -> None:
    world.instances["prefill-0"].instance.failures = [RequestRefused("token 500 is none of the model's")]
    answer = world.post(prompt=PROMPT, max_tokens=5)
    assert answer.status_code == 400
    assert "none of the model's" in answer.json()["error"]["message"]


def test_an_error_after_the_first_token_ends_the_stream_with_it_and_is_logged(
    make_world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(Role.PREFILL, Role.DECODE)
    world.instances["decode-1"].instance.failures = [PoolweaveError("the model computed NaN")]
    answer = world.post(prompt=PROMPT, max_tokens=5, stream=True)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["error"]["message"] == "the server failed on this request; its log says why"
    assert "the model computed NaN" in caplog.text
    assert f"request {answer.headers['x-request-id']} (cmpl-" in caplog.text
    assert answer.text.endswith("data: [DONE]\n\n")


def test_requests_wait_for_an_instance_that_comes_back(make_world: Callable[..., World]) -> None:
    world = make_world(Role.COLOCATED, wait_s=60.0)
    world.instances.pop("colocated-0").close()
    until(lambda: world.usable == 0, "it is gone")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(world.post, prompt=PROMPT, max_tokens=4)
        until(lambda: world.client.get("/deployment").json()["in_flight"] == 1, "it waits")
        world.add("colocated-0", Role.COLOCATED)
        assert text_in(waiting.result()) == text_of(answer_of(PROMPT, 4))


def test_a_deadline_is_504_and_cancels(make_world: Callable[..., World]) -> None:
    world = make_world(Role.COLOCATED, timeout_s=0.2)
    world.hold()
    answer = world.post(prompt=PROMPT, max_tokens=5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    until(lambda: world.log("Cancel"), "it is cancelled")


def test_pools_get_to_know_the_other_phase_and_drop_who_is_gone(make_world: Callable[..., World]) -> None:
    """What a dead peer had asked for is freed with its disconnection (tests/transfer)."""
    world = make_world(Role.PREFILL, Role.DECODE, Role.COLOCATED)
    pools = {name: thread.instance.pool for name, thread in world.instances.items()}
    until(lambda: set(pools["prefill-0"].peers) == {"decode-1"}, "prefill knows decode")
    until(lambda: set(pools["decode-1"].peers) == {"prefill-0"}, "decode knows prefill")
    assert not pools["colocated-2"].peers
    world.instances.pop("decode-1").close()
    until(lambda: not pools["prefill-0"].peers, "prefill has dropped it")
    world.add("decode-1", Role.DECODE)
    until(lambda: set(pools["prefill-0"].peers) == {"decode-1"}, "its next life is known")
