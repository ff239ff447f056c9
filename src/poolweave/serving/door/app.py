"""The door's routes: OpenAI's, and those for whoever runs it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from poolweave import __version__
from poolweave.errors import PoolweaveError
from poolweave.serving.door.answer_text import AnswerText
from poolweave.serving.door.ask import Ask
from poolweave.serving.door.config import KeyConfig
from poolweave.serving.door.documents import ChatDocuments, CompletionDocuments, Documents
from poolweave.serving.door.failure import Failure, Refusal, failure_of
from poolweave.serving.door.gate import TurnedAway
from poolweave.serving.door.house import House
from poolweave.serving.door.response import AnswerResponse, Delivery
from poolweave.serving.door.schema import ChatRequest, CompletionRequest

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

_ERROR: dict[str, Any] = {
    "description": "OpenAI's error object",
    "content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}},
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or with `stream` its chunks as server-sent events",
          "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}},
    **{status: _ERROR for status in (400, 401, 404, 429, 500, 503, 504)},
}  # fmt: skip
_CLIENT_ID = re.compile(r"[!-~]{1,128}")


def create_app(house: House, lifespan: Lifespan | None = None) -> FastAPI:
    """The ASGI application over a house."""
    app = FastAPI(title="poolweave", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.post("/v1/chat/completions", responses=_ANSWERS)
    async def chat(request: Request, asked: ChatRequest) -> Response:
        """Answer a conversation."""
        tenant = _tenant(house, request)
        return _answer(house, request, tenant, asked, lambda: house.reception.chat(asked, tenant), ChatDocuments)

    @app.post("/v1/completions", responses=_ANSWERS)
    async def completion(request: Request, asked: CompletionRequest) -> Response:
        """Continue a text."""
        tenant = _tenant(house, request)
        return _answer(
            house, request, tenant, asked, lambda: house.reception.completion(asked, tenant), CompletionDocuments
        )

    @app.get("/v1/models", responses={401: _ERROR})
    async def models(request: Request) -> dict[str, Any]:
        """What is served."""
        _tenant(house, request)
        return {"object": "list", "data": [_model(house)]}

    @app.get("/v1/models/{name:path}", responses={401: _ERROR, 404: _ERROR})
    async def model(request: Request, name: str) -> dict[str, Any]:
        """One model."""
        _tenant(house, request)
        if name != house.model:
            message = f"the model {name[:100]!r} is not served here; there is {house.model!r}"
            raise Refusal(Failure(status=404, message=message, code="model_not_found", param="model"))
        return _model(house)

    _operations(app, house)
    _errors(app, house)
    return app


def _operations(app: FastAPI, house: House) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """The door runs."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: _ERROR})
    async def ready() -> dict[str, str]:
        """Requests can be answered now: 503 while instances are missing, and while it drains."""
        if house.gate.draining:
            raise Refusal(Failure(status=503, message="draining", code="draining", retry_after_s=1))
        if not house.links.ready:
            message = f"{len(house.links.linked)} of {len(house.links.members)} instances are up, which is not enough"
            raise Refusal(Failure(status=503, message=message, code="no_instance", retry_after_s=1))
        return {"status": "ready"}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Counters in Prometheus' text format."""
        return Response(house.metrics_text(), media_type="text/plain; version=0.0.4")

    @app.get("/deployment")
    async def deployment(request: Request) -> dict[str, Any]:
        """The members and their loads, for `poolweave top`."""
        _tenant(house, request)
        return house.deployment()


def _errors(app: FastAPI, house: House) -> None:
    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"] if part != "body") or None
        said = str(first["msg"]).removeprefix("Value error, ")
        message = f"{param}: {said}" if param else said
        return _failed(request, Failure(status=400, message=message, code="invalid_request", param=param))

    async def wrong_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = _failed(
            request, Failure(status=error.status_code, message=str(error.detail), code="invalid_request")
        )
        response.headers.update(error.headers or {})
        return response

    async def refused(request: Request, error: Exception) -> Response:
        failure = failure_of(error, house.retry_after_s)
        if isinstance(error, TurnedAway):
            house.metrics.turned_away(error.reason.value, error.tenant)
        else:
            house.metrics.failed(failure.status)
        return _failed(request, failure)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, wrong_path)
    for kind in (Refusal, TurnedAway, PoolweaveError):
        app.add_exception_handler(kind, refused)


def _answer(
    house: House,
    request: Request,
    tenant: KeyConfig,
    asked: ChatRequest | CompletionRequest,
    ask_of: Callable[[], Ask],
    documents: Callable[[str, str, bool], Documents],
) -> Response:
    place = house.gate.enter(tenant)
    try:
        ask = ask_of()
        delivery = Delivery(
            ask=ask,
            text=AnswerText(house.prompter.stream(ask.prompt), ask.sampling.stop),
            documents=documents(ask.request_id, house.model, asked.stream and asked.include_usage),
            dispatcher=house.dispatcher,
            metrics=house.metrics,
            place=place,
            retry_after_s=house.retry_after_s,
            streams=asked.stream,
            shows_usage=asked.include_usage,
            client_id=_client_id(request),
        )
    except BaseException:
        place.leave()
        raise
    return AnswerResponse(delivery)


def _tenant(house: House, request: Request) -> KeyConfig:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return house.gate.tenant(key.strip() if scheme.lower() == "bearer" else None)


def _client_id(request: Request) -> str:
    """The client's own name for this request, echoed; one of ours where it has none that can be."""
    given = request.headers.get("x-request-id", "")
    return given if _CLIENT_ID.fullmatch(given) else secrets.token_hex(16)


def _failed(request: Request, failure: Failure) -> Response:
    headers = {**failure.headers, "X-Request-Id": _client_id(request)}
    return Response(failure.body, failure.status, headers, "application/json")


def _model(house: House) -> dict[str, Any]:
    return {"id": house.model, "object": "model", "created": int(house.started_s), "owned_by": "poolweave"}
