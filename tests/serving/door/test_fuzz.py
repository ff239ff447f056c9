"""schemathesis over /openapi.json: whatever fits the document, and whatever does not, never gets a 500."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from ref_door import World

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.generation import GenerationMode  # noqa: E402


def fuzz(world: World, cases: int) -> Counter[int]:
    """Statuses seen over all operations, half of the cases made to break the document."""
    statuses: Counter[int] = Counter()
    schema = schemathesis.openapi.from_dict(world.client.get("/openapi.json").json())
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and operation.method.upper() != "POST":
                continue  # nothing in it could be wrong

            @settings(
                max_examples=cases, deadline=None, database=None, phases=[Phase.generate], derandomize=True,
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(case=operation.as_strategy(generation_mode=mode))
            def run(case: Any) -> None:
                answer = ask(world, case)
                statuses[answer.status_code] += 1
                assert answer.status_code < 500, (case.method, case.formatted_path, case.body, answer.text)

            run()
    return statuses


def ask(world: World, case: Any) -> httpx.Response:
    """Send it; where there is a model in it, the one that is served, so that the rest matters."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = world.model
    body: dict[str, Any] = {} if case.method == "GET" else {"json": case.body}
    try:
        return world.client.request(case.method, case.formatted_path, **body)
    except (TypeError, ValueError, httpx.InvalidURL):  # no client can send this
        return httpx.Response(400)


def test_no_request_is_a_500(world: World) -> None:
    statuses = fuzz(world, 3)
    assert statuses[200] > 1, "some were right"
    assert statuses[400] > 1, "some were wrong"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_request_of_thousands_is_a_500(world: World) -> None:
    assert fuzz(world, 700).total() > 2000


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b'{"model": "\\ud800"}'],
    ids=["empty", "cut", "null", "list", "text", "not utf-8", "nan", "deep", "surrogate"],
)
def test_a_body_that_is_no_request_is_a_400(world: World, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = world.client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
