"""A route for one JSON document: documented by FastAPI as any other, answered without its machinery of dependencies,
which takes as long as all else that the door does with a short request (benchmarks/bench_door.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from poolweave.serving.door.failure import Failure, Refusal

Endpoint = Callable[[Request, Any], Response]


class DirectRoute(APIRoute):
    """POST `path`: `answer(request, asked)` with the body as `document`.

    `endpoint` is what FastAPI documents: its signature and its docstring; it is never called.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        document: type[BaseModel],
        answer: Endpoint,
        responses: dict[int | str, dict[str, Any]],
    ) -> None:
        super().__init__(path, endpoint, methods=["POST"], responses=responses)
        self._document = document
        self._answer = answer

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            raise HTTPException(405, headers={"Allow": "POST"})
        request = Request(scope, receive)
        try:
            body = await request.body()
        except ClientDisconnect as error:
            raise HTTPException(400, "the client went away before all of its request had come") from error
        response = self._answer(request, self._read(request, body))
        await response(scope, receive, send)

    def _read(self, request: Request, body: bytes) -> BaseModel:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not (kind.startswith("application/") and kind.endswith(("/json", "+json"))):
            raise _refused(f"a body of type {kind[:100]!r} is not read; send JSON as 'Content-Type: application/json'")
        try:
            return self._document.model_validate(json.loads(body))
        except ValidationError as error:
            raise RequestValidationError(error.errors(include_url=False)) from error
        except json.JSONDecodeError as error:
            raise _refused(f"the body is no JSON: {error.msg} at character {error.pos}") from error
        except (ValueError, RecursionError) as error:
            raise _refused(f"the body is no JSON that can be read: {error}") from error


def _refused(message: str) -> Refusal:
    return Refusal(Failure(status=400, message=message, code="invalid_request"))
