"""What every request passes on its way to a route: its name, its key, the bound of its body, and what breaks behind."""

from __future__ import annotations

import logging
import re
import secrets

from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from poolweave.serving.door.config import KeyConfig
from poolweave.serving.door.failure import Failure, failure_of
from poolweave.serving.door.gate import TurnedAway
from poolweave.serving.door.house import House

logger = logging.getLogger(__name__)

_WITHOUT_KEY = frozenset({"/health", "/ready", "/metrics", "/openapi.json"})
_CLIENT_ID = re.compile(r"[!-~]{1,128}")


class Entrance:
    """ASGI middleware. Routes find `request.state.tenant`, whose key it is, and `request.state.client_id`.

    The key is looked at before the body is read, and no more of a body is read than `max_body`: 413. An exception that
    nobody expected is logged with the request's id and answered with a 500.
    """

    def __init__(self, app: ASGIApp, house: House, max_body_bytes: int) -> None:
        self._app = app
        self._house = house
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        request.state.client_id = _client_id(request)
        response = _Started(send)
        try:
            if scope["path"] not in _WITHOUT_KEY:
                request.state.tenant = self._tenant(request)
            await self._app(scope, _Bounded(receive, request, self._max_body_bytes), response)
        except TurnedAway as error:
            await error_response(self._house, request, error)(scope, receive, send)
        except Exception as error:
            logger.exception("request %s failed", request.state.client_id)
            if response.started:
                raise  # too late for a status: the connection breaks
            await error_response(self._house, request, error)(scope, receive, send)

    def _tenant(self, request: Request) -> KeyConfig:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return self._house.gate.tenant(key.strip() if scheme.lower() == "bearer" else None)


class _Started:
    """`send`, and whether it was used."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def __call__(self, message: Message) -> None:
        self.started = True
        await self._send(message)


class _Bounded:
    """`receive` up to a bound: told by Content-Length before anything is read, counted in any case."""

    def __init__(self, receive: Receive, request: Request, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        length = request.headers.get("content-length", "")
        self._told = int(length) if length.isdecimal() else 0
        self._read = 0

    async def __call__(self) -> Message:
        self._check(self._told)
        message = await self._receive()
        self._read += len(message.get("body", b""))
        self._check(self._read)
        return message

    def _check(self, nbytes: int) -> None:
        if nbytes > self._limit:
            raise HTTPException(
                413,
                f"the body is larger than {self._limit} bytes, which is max_body of this server; send a shorter one",
            )


def error_response(house: House, request: Request, error: Exception) -> Response:
    """What a client gets for `error`, which is counted."""
    failure = failure_of(error, house.retry_after_s)
    if isinstance(error, TurnedAway):
        house.metrics.turned_away(error.reason.value, error.tenant)
    else:
        house.metrics.failed(failure.status)
    return failure_response(request, failure)


def failure_response(request: Request, failure: Failure) -> Response:
    """OpenAI's error object under the request's id."""
    headers = {**failure.headers, "X-Request-Id": request.state.client_id}
    return Response(failure.body, failure.status, headers, "application/json")


def _client_id(request: Request) -> str:
    """The client's own name for this request, echoed; one of ours where it has none that can be."""
    given = request.headers.get("x-request-id", "")
    return given if _CLIENT_ID.fullmatch(given) else secrets.token_hex(16)
