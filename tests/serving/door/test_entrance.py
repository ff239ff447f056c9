"""What a request passes before its route: the key before the body, the bound of the body, and what breaks behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from ref_door import World

from poolweave.serving.door.config import KeyConfig
from poolweave.types import Role

JSON = {"Content-Type": "application/json"}
SENT = b'{"model": "echo", "max_tokens": 1, %s}'


@pytest.fixture(scope="module")
def guarded(words: Any) -> Iterator[World]:
    """With a key and a small bound of bodies."""
    made = World(words, (Role.COLOCATED,), keys=(KeyConfig(name="a", key="sk-a"),), max_body="1KiB")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", rb'"prompt": "\ud800"', "prompt"),
        ("completions", rb'"prompt": ["\ud800"]', "prompt"),
        ("completions", rb'"prompt": "x", "stop": "\ud800"', "stop"),
        ("completions", rb'"prompt": "x", "stop": ["y", "\ud800"]', "stop"),
        ("completions", rb'"prompt": "x", "user": "\ud800"', "user"),
        ("completions", rb'"prompt": "x", "session_id": "\udfff"', "session_id"),
        ("completions", rb'"prompt": "x", "cache_salt": "\ud800"', "cache_salt"),
        ("completions", rb'"prompt": "x", "suffix": "\ud800"', "suffix"),
        ("completions", rb'"prompt": "x", "\ud800": 1', None),
        ("completions", rb'"prompt": "x", "logit_bias": {"\ud800": "y"}', "logit_bias.\ufffd\ufffd\ufffd"),
        ("chat/completions", rb'"messages": [{"role": "user", "content": "\ud800"}]', "messages.0.content"),
        (
            "chat/completions",
            rb'"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]',
            "messages.0.content",
        ),
        ("chat/completions", rb'"messages": [{"role": "\ud800", "content": "x"}]', "messages.0.role"),
    ],
)
def test_half_a_character_is_a_400_that_says_where(world: World, path: str, fields: bytes, param: str | None) -> None:
    answer = world.client.post(f"/v1/{path}", content=SENT % fields, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["param"] == param


def test_what_nobody_expected_is_a_500_under_the_requests_id_and_in_the_log(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a wheel came off")

    monkeypatch.setattr(world.door._houses.first.reception, "completion", broken)
    answer = world.client.post(
        "/v1/completions", json={"model": world.model, "prompt": "x"}, headers={"X-Request-Id": "mine-8"}
    )
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "mine-8"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "request mine-8 failed" in caplog.text
    assert "RuntimeError: a wheel came off" in caplog.text
    assert world.client.get("/deployment").json()["in_flight"] == 0


def test_the_key_is_looked_at_before_the_body(guarded: World) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        for body in (b"{}", b"{", b"x" * 5000):
            answer = guarded.client.post(path, content=body, headers={"Authorization": "Bearer sk-b"})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert guarded.client.get("/deployment").status_code == 401
    for path in ("/health", "/ready", "/metrics", "/openapi.json"):
        assert guarded.client.get(path).status_code == 200


def pieces(told: int) -> Iterator[bytes]:
    for _ in range(told):
        yield b"x" * 100


@pytest.mark.parametrize("body", [lambda: b"x" * 2000, lambda: pieces(20)], ids=["told", "in chunks"])
def test_a_body_over_the_bound_is_a_413(guarded: World, body: Callable[[], Any]) -> None:
    answer = guarded.client.post("/v1/completions", content=body(), headers=guarded.headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert "1024 bytes, which is max_body" in answer.json()["error"]["message"]
    body_below = {"model": guarded.model, "prompt": "y" * 900, "max_tokens": 1}
    right = httpx.post(f"{guarded.door.address}/v1/completions", json=body_below, headers=guarded.headers, timeout=60)
    assert right.status_code == 200


def test_bad_json_is_a_400_without_a_parameter(world: World) -> None:
    answer = world.client.post("/v1/completions", content=b'{"model": oh}', headers=JSON)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] is None
    assert error["message"] == "the body is no JSON: Expecting value at character 10"
