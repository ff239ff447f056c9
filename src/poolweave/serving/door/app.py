"""The door's routes: OpenAI's, and those for whoever runs it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from poolweave import __version__
from poolweave.errors import PoolweaveError
from poolweave.serving.door.answer_text import AnswerText
from poolweave.serving.door.ask import Ask
from poolweave.serving.door.direct_route import DirectRoute
from poolweave.serving.door.documents import ChatDocuments, CompletionDocuments, Documents
from poolweave.serving.door.entrance import Entrance, error_response, failure_response
from poolweave.serving.door.failure import Failure, Refusal
from poolweave.serving.door.gate import TurnedAway
from poolweave.serving.door.house import House
from poolweave.serving.door.houses import Houses
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


def create_app(houses: Houses, lifespan: Lifespan | None = None) -> FastAPI:
    """The ASGI application over the models' houses."""
    app = FastAPI(title="poolweave", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Entrance, house=houses.first, max_body_bytes=houses.first.max_body_bytes)

    _questions(app, houses)

    @app.get("/v1/models", responses={401: _ERROR})
    async def models() -> dict[str, Any]:
        """What is served."""
        return {"object": "list", "data": [_model(house) for house in houses.all]}

    @app.get("/v1/models/{name:path}", responses={401: _ERROR, 404: _ERROR})
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        return _model(houses.of(name))

    _operations(app, houses)
    _errors(app, houses.first)
    return app


def _questions(app: FastAPI, houses: Houses) -> None:
    def chat(asked: ChatRequest) -> None:
        """Answer a conversation."""

    def completion(asked: CompletionRequest) -> None:
        """Continue a text."""

    def answer_chat(request: Request, asked: ChatRequest) -> Response:
        house = houses.of(asked.model)
        return _answer(house, request, asked, lambda: house.reception.chat(asked, request.state.tenant), ChatDocuments)

    def answer_completion(request: Request, asked: CompletionRequest) -> Response:
        house = houses.of(asked.model)
        return _answer(
            house, request, asked, lambda: house.reception.completion(asked, request.state.tenant), CompletionDocuments
        )

    for path, endpoint, document, answer in (
        ("/v1/chat/completions", chat, ChatRequest, answer_chat),
        ("/v1/completions", completion, CompletionRequest, answer_completion),
    ):
        app.routes.append(DirectRoute(path, endpoint, document=document, answer=answer, responses=_ANSWERS))


def _operations(app: FastAPI, houses: Houses) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """The door runs."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: _ERROR})
    async def ready(request: Request) -> Response:
        """Requests can be answered now: 503 while instances are missing, and while it drains. Never counted."""
        if houses.first.gate.draining:
            failure = Failure(status=503, message="draining", code="draining", retry_after_s=1)
            return failure_response(request, failure)
        if houses.missing:
            failure = Failure(status=503, message=houses.missing, code="no_instance", retry_after_s=1)
            return failure_response(request, failure)
        return JSONResponse({"status": "ready"})

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Counters in Prometheus' text format."""
        return Response(houses.metrics_text(), media_type="text/plain; version=0.0.4")

    @app.get("/deployment")
    async def deployment() -> dict[str, Any]:
        """The members and their loads, for `poolweave top`."""
        return houses.deployment()


def _errors(app: FastAPI, house: House) -> None:
    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        said = str(first["msg"]).removeprefix("Value error, ")
        param = ".".join(str(part) for part in first["loc"]) or None
        message = f"{param}: {said}" if param else said
        house.metrics.failed(400)
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
