"""Writes one answer to one client, whole or as it comes, and stops everything when the client has gone."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing, suppress
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from poolweave.serving.door.answer_text import AnswerText
from poolweave.serving.door.ask import Ask, Outcome
from poolweave.serving.door.dispatch import Dispatcher
from poolweave.serving.door.documents import DONE, Documents, event, usage_of
from poolweave.serving.door.failure import CLIENT_GONE, Failure, failure_of
from poolweave.serving.door.gate import Place
from poolweave.serving.door.metrics import Metrics

logger = logging.getLogger(__name__)

_REASONS = {"cancelled": "stop"}  # an instance that stops says so; OpenAI has no word for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What an answer is written from. `place`: the request's place inside the gate, given up at its end."""

    ask: Ask
    text: AnswerText
    documents: Documents
    dispatcher: Dispatcher
    metrics: Metrics
    place: Place
    retry_after_s: int
    streams: bool
    shows_usage: bool
    client_id: str  # its X-Request-Id


class AnswerResponse(Response):
    """An ASGI response. The status is sent with the first token, so that what fails before it has its own."""

    def __init__(self, delivery: Delivery) -> None:
        super().__init__()
        self._delivery = delivery
        self._outcome = Outcome()
        self._arrived_s = self._last_s = time.perf_counter()
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the request until its end, or its client's."""
        work = asyncio.ensure_future(self._deliver(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._delivery.metrics.failed(CLIENT_GONE)
        finally:
            gone.cancel()
            work.cancel()
            self._delivery.place.leave()
            with suppress(asyncio.CancelledError):
                await work

    async def _deliver(self, send: Send) -> None:
        delivery = self._delivery
        try:
            if delivery.streams:
                await self._stream(send)
            else:
                await self._whole(send)
        except Exception as error:
            failure = failure_of(error, delivery.retry_after_s)
            if failure.status == 500:  # of which the client hears that the log says why
                logger.exception("request %s (%s) failed", delivery.client_id, delivery.ask.request_id)
            await self._fail(send, failure)
            return
        delivery.metrics.ended(delivery.ask, self._outcome, time.perf_counter() - self._arrived_s)

    async def _whole(self, send: Send) -> None:
        delivery = self._delivery
        pieces: list[str] = []
        async with aclosing(delivery.dispatcher.answer(delivery.ask, self._outcome)) as answer:
            async for tokens in answer:
                pieces.append(self._text(tokens))
                if delivery.text.stopped:
                    break
        pieces.append(delivery.text.end())
        usage = usage_of(delivery.ask, self._outcome)
        body = delivery.documents.whole("".join(pieces), self._reason(), usage)
        await self._start(send, 200, b"application/json", {"Content-Length": str(len(body))})
        await self._write(send, body, more=False)

    async def _stream(self, send: Send) -> None:
        delivery = self._delivery
        documents = delivery.documents
        async with aclosing(delivery.dispatcher.answer(delivery.ask, self._outcome)) as answer:
            async for tokens in answer:
                data = b""
                if not self._started:
                    await self._start(send, 200, b"text/event-stream; charset=utf-8")
                    data = documents.opening()
                for token in tokens:
                    text = self._text([token])
                    data += documents.piece(text) if text else b""
                if data:
                    await self._write(send, data)
                if delivery.text.stopped:
                    break
        if not self._started:  # it was cancelled where it ran before its first token
            await self._start(send, 200, b"text/event-stream; charset=utf-8")
        rest = delivery.text.end()
        data = documents.piece(rest) if rest else b""
        data += documents.closing(self._reason())
        if delivery.shows_usage:
            data += documents.usage(usage_of(delivery.ask, self._outcome))
        await self._write(send, data + DONE, more=False)

    def _text(self, tokens: list[int]) -> str:
        now = time.perf_counter()
        if len(self._outcome.answer) == len(tokens):
            self._delivery.metrics.first_token(now - self._arrived_s)
        else:
            self._delivery.metrics.next_tokens(len(tokens), now - self._last_s)
        self._last_s = now
        return "".join([self._delivery.text.add(token) for token in tokens])

    def _reason(self) -> str:
        if self._delivery.text.stopped:
            self._outcome.finish_reason = "stop"
        reason = self._outcome.finish_reason or "stop"
        return _REASONS.get(reason, reason)

    async def _fail(self, send: Send, failure: Failure) -> None:
        """With its status where nothing was sent yet, else as the stream's last event."""
        self._delivery.metrics.failed(failure.status)
        if self._started:
            await self._write(send, event(failure.document) + DONE, more=False)
            return
        headers = {**failure.headers, "Content-Length": str(len(failure.body))}
        await self._start(send, failure.status, b"application/json", headers)
        await self._write(send, failure.body, more=False)

    async def _start(self, send: Send, status: int, kind: bytes, extra: dict[str, str] | None = None) -> None:
        self._started = True
        headers = [(b"content-type", kind), (b"x-request-id", self._delivery.client_id.encode("latin-1"))]
        headers += [(name.lower().encode(), value.encode()) for name, value in (extra or {}).items()]
        if kind.startswith(b"text/event-stream"):
            headers.append((b"cache-control", b"no-cache"))
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, send: Send, data: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
