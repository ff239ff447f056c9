"""schemathesis over /openapi.json: whatever fits the document, and whatever does not, never gets a 500.

Behind the door is an instance that answers at once; answers are kept short, so that requests are many and not long.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from ref_door import World

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.generation import GenerationMode  # noqa: E402

SHORT = 16  # tokens of an answer, where a request lets the model fill its context


def fuzz(world: World, cases: int) -> Counter[int]:
    """Statuses seen over all operations, half of the cases made to break the document; a quarter as many where there is
    only a path to get wrong."""
    statuses: Counter[int] = Counter()
    schema = schemathesis.openapi.from_dict(world.client.get("/openapi.json").json())
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            posts = operation.method.upper() == "POST"
            if mode is GenerationMode.NEGATIVE and not posts:
                continue  # nothing in it could be wrong

            @settings(
                max_examples=cases if posts else -(-cases // 4), deadline=None, database=None, derandomize=True,
                phases=[Phase.generate],
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
        if all(case.body.get(name) is None for name in ("max_tokens", "max_completion_tokens")):
            case.body["max_tokens"] = SHORT
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
@pytest.mark.timeout(600)
def test_no_request_of_very_many_is_a_500(world: World) -> None:
    statuses = fuzz(world, 350)
    assert statuses.total() > 1400
    assert min(statuses[200], statuses[400], statuses[404]) > 50, statuses


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
