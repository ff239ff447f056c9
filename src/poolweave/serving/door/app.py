"""The door's routes: OpenAI's, and those for whoever runs it."""

from __future__ import annotations

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
from poolweave.serving.door.documents import ChatDocuments, CompletionDocuments, Documents
from poolweave.serving.door.entrance import Entrance, error_response, failure_response
from poolweave.serving.door.failure import Failure, Refusal
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
    **{status: _ERROR for status in (400, 401, 404, 413, 429, 500, 503, 504)},
}  # fmt: skip


def create_app(house: House, lifespan: Lifespan | None = None) -> FastAPI:
    """The ASGI application over a house."""
    app = FastAPI(title="poolweave", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Entrance, house=house, max_body_bytes=house.max_body_bytes)

    @app.post("/v1/chat/completions", responses=_ANSWERS)
    async def chat(request: Request, asked: ChatRequest) -> Response:
        """Answer a conversation."""
        return _answer(house, request, asked, lambda: house.reception.chat(asked, request.state.tenant), ChatDocuments)

    @app.post("/v1/completions", responses=_ANSWERS)
    async def completion(request: Request, asked: CompletionRequest) -> Response:
        """Continue a text."""
        return _answer(
            house, request, asked, lambda: house.reception.completion(asked, request.state.tenant), CompletionDocuments
        )

    @app.get("/v1/models", responses={401: _ERROR})
    async def models() -> dict[str, Any]:
        """What is served."""
        return {"object": "list", "data": [_model(house)]}

    @app.get("/v1/models/{name:path}", responses={401: _ERROR, 404: _ERROR})
    async def model(name: str) -> dict[str, Any]:
        """One model."""
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
    async def deployment() -> dict[str, Any]:
        """The members and their loads, for `poolweave top`."""
        return house.deployment()


def _errors(app: FastAPI, house: House) -> None:
    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        said = str(first["msg"]).removeprefix("Value error, ")
        if first["type"] == "json_invalid":  # its place is a position in the body
            said = f"the body is no JSON: {first['ctx']['error']} at character {first['loc'][-1]}"
            return failure_response(request, Failure(status=400, message=said, code="invalid_request"))
        param = ".".join(str(part) for part in first["loc"] if part != "body") or None
        message = f"{param}: {said}" if param else said
        return failure_response(request, Failure(status=400, message=message, code="invalid_request", param=param))

    async def wrong_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = "body_too_large" if error.status_code == 413 else "invalid_request"
        failure = Failure(status=error.status_code, message=str(error.detail), code=code)
        response = failure_response(request, failure)
        response.headers.update(error.headers or {})
        return response

    async def refused(request: Request, error: Exception) -> Response:
        return error_response(house, request, error)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, wrong_path)
    for kind in (Refusal, TurnedAway, PoolweaveError):
        app.add_exception_handler(kind, refused)


def _answer(
    house: House,
    request: Request,
    asked: ChatRequest | CompletionRequest,
    ask_of: Callable[[], Ask],
    documents: Callable[[str, str, bool], Documents],
) -> Response:
    place = house.gate.enter(request.state.tenant)
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
            client_id=request.state.client_id,
        )
    except BaseException:
        place.leave()
        raise
    return AnswerResponse(delivery)


def _model(house: House) -> dict[str, Any]:
    return {"id": house.model, "object": "model", "created": int(house.started_s), "owned_by": "poolweave"}
