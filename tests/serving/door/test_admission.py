"""Who is let in: keys, bounds, quotas, draining."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
from ref_door import World
from ref_waiting import until

from poolweave.serving.door.config import KeyConfig
from poolweave.types import Role

KEYS = (KeyConfig(name="a", key="sk-a", max_in_flight=2), KeyConfig(name="b", key="sk-b", isolated=True))


def ask(world: World, key: str | None = None, prompt: str = "hello", **fields: object) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"model": world.model, "prompt": prompt, "max_tokens": 3, **fields}
    return httpx.post(f"{world.door.address}/v1/completions", json=body, headers=headers, timeout=60)


def in_flight(world: World) -> int:
    return int(world.client.get("/deployment").json()["in_flight"])


def test_over_the_bound_is_429_with_retry_after_and_the_others_are_answered(make_world: Callable[..., World]) -> None:
    world = make_world(Role.COLOCATED, max_in_flight=3)
    world.hold()
    with ThreadPoolExecutor(3) as pool:
        inside = [pool.submit(ask, world) for _ in range(3)]
        until(lambda: in_flight(world) == 3, "three are inside")
        refused = ask(world)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        world.hold(open_=True)
        assert [one.result().status_code for one in inside] == [200] * 3
    assert ask(world).status_code == 200
    assert 'poolweave:requests_turned_away_total{model_name="echo",reason="full"' in world.client.get("/metrics").text


def test_keys_are_asked_for_and_a_tenant_over_its_quota_leaves_another_untouched(
    make_world: Callable[..., World],
) -> None:
    """C37: A's request over its bound is turned away with 429 and counted; B's are answered."""
    world = make_world(Role.COLOCATED, keys=KEYS)
    world.client.headers["Authorization"] = "Bearer sk-a"
    for key in (None, "sk-c"):
        answer = ask(world, key)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    world.hold()
    with ThreadPoolExecutor(4) as pool:
        of_a = [pool.submit(ask, world, "sk-a") for _ in range(2)]
        until(lambda: in_flight(world) == 2, "A has its two")
        refused = ask(world, "sk-a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
        of_b = [pool.submit(ask, world, "sk-b") for _ in range(2)]
        until(lambda: in_flight(world) == 4, "B comes in beside them")
        world.hold(open_=True)
        assert [one.result().status_code for one in (*of_a, *of_b)] == [200] * 4
    counted = 'poolweave:requests_turned_away_total{model_name="echo",reason="quota",tenant="a"} 1.0'
    assert counted in world.client.get("/metrics").text


def test_an_isolated_tenant_shares_no_kv(make_world: Callable[..., World]) -> None:
    world = make_world(Role.COLOCATED, keys=KEYS)

    def cached(key: str) -> int:
        return int(ask(world, key, "p" * 64).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached("sk-a"), cached("sk-a"), cached("sk-b"), cached("sk-b")] == [0, 48, 0, 48]


def test_stopping_answers_who_is_inside_and_turns_new_ones_away(make_world: Callable[..., World]) -> None:
    world = make_world(Role.PREFILL, Role.DECODE)
    world.hold()
    with ThreadPoolExecutor(1) as pool:
        inside = pool.submit(ask, world)
        until(lambda: in_flight(world) == 1, "it is inside")
        world.door.stop()
        until(lambda: world.client.get("/ready").status_code == 503, "it drains")
        refused = ask(world)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        world.hold(open_=True)
        assert inside.result().status_code == 200


def test_no_instance_is_503_at_once_from_ready_and_after_a_wait_from_a_request(
    make_world: Callable[..., World],
) -> None:
    world = make_world(wait_s=0.2)
    assert world.client.get("/health").status_code == 200
    assert world.client.get("/ready").status_code == 503
    answer = ask(world)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_instance")
    assert "retry-after" in answer.headers


def test_only_a_bearer_key_counts(make_world: Callable[..., World]) -> None:
    world = make_world(keys=KEYS)
    for given, status in (
        ("", 401), ("Basic sk-a", 401), ("Bearer", 401), ("Bearer sk-", 401), ("Bearer  sk-a", 200),
        ("bearer sk-b", 200),
    ):  # fmt: skip
        answer = httpx.get(f"{world.door.address}/v1/models", headers={"Authorization": given}, timeout=60)
        assert answer.status_code == status, given


def test_refused_requests_are_counted_and_probes_are_not(make_world: Callable[..., World]) -> None:
    world = make_world(wait_s=0.2)

    def failed(status: int) -> float:
        name = f'poolweave:requests_failed_total{{model_name="{world.model}",status="{status}"}} '
        lines = world.client.get("/metrics").text.splitlines()
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    assert world.client.get("/ready").status_code == 503
    assert failed(503) == 0
    assert ask(world).status_code == 503
    assert failed(503) == 1
    assert [ask(world, **wrong).status_code for wrong in ({"n": 2}, {"temperature": -1})] == [400, 400]
    assert failed(400) == 2
