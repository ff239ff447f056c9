"""One request on its way through the deployment: routed, retried on other instances, cancelled when nobody listens.

A retry goes on where the answer was cut off: the tokens that the client has are part of the next attempt's prompt, and
a seed makes the draw of each position the same wherever it is made.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from poolweave.errors import (
    DeadlineExceeded,
    DuplicateTransfer,
    InstanceClosed,
    NoInstance,
    OutOfBlocks,
    PeerLost,
    PoolweaveError,
    TransferFailed,
    UnknownPeer,
    WorkerLost,
)
from poolweave.scheduler.global_scheduler import GlobalScheduler
from poolweave.scheduler.routes import Route
from poolweave.serving.control.messages import (
    Cancel,
    Complete,
    Decode,
    Discard,
    Emit,
    Finished,
    Job,
    Prefill,
    Prefilled,
    Welcome,
    pack_tokens,
)
from poolweave.serving.door.ask import Ask, Outcome
from poolweave.serving.door.config import DoorConfig
from poolweave.serving.door.copies import Copies, Prefix
from poolweave.serving.door.link import InstanceLink
from poolweave.serving.door.links import Links
from poolweave.types import Int32Array

logger = logging.getLogger(__name__)

_ELSEWHERE = (PeerLost, InstanceClosed, TransferFailed, UnknownPeer, DuplicateTransfer, OutOfBlocks, WorkerLost)
# With what the last token of a whole answer comes: a prefill instance gives one token of any answer.
_ENDS: Mapping[type[Any], tuple[str, ...]] = {
    Prefill: ("stop",), Decode: ("stop", "length"), Complete: ("stop", "length"),
}  # fmt: skip
_MOST_NAMES = 4096  # clients choose salts
_PAUSE_S = 0.05  # before another attempt: two pools may be about to get to know each other


class Dispatcher:
    """Used from one event loop. `answer` gives tokens as they come; the outcome it fills tells the rest."""

    def __init__(self, config: DoorConfig, scheduler: GlobalScheduler, links: Links, copies: Copies) -> None:
        self._config = config
        self._scheduler = scheduler
        self._links = links
        self.copies = copies
        self._life = secrets.token_hex(4)  # attempts of an earlier door under the same request id are others
        self._numbers = itertools.count()
        self._named: Welcome | None = None  # whose namespaces these are, by salt
        self._namespaces: dict[bytes, int] = {}
        self.retried = 0
        self.asked = 0  # requests that have not ended
        self.answering = 0  # those whose first token is out

    async def answer(self, ask: Ask, outcome: Outcome) -> AsyncGenerator[list[int], None]:
        """New tokens of the answer, as they come. Closing it early cancels the request wherever it is.

        Raises NoInstance when none came within `wait_s`, DeadlineExceeded, RequestRefused and what else an instance
        refuses it with; PeerLost, TransferFailed and their like when the last attempt failed.
        """
        until = asyncio.get_running_loop().time() + self._config.timeout_s
        begun = 0
        self.asked += 1
        try:
            async with aclosing(self._attempts(ask, outcome, until)) as tokens:
                async for new in tokens:
                    self.answering += 1 - begun
                    begun = 1
                    yield new
        finally:
            self.asked -= 1
            self.answering -= begun

    async def _attempts(self, ask: Ask, outcome: Outcome, until: float) -> AsyncGenerator[list[int], None]:
        while True:
            tokens = np.array(ask.prompt + outcome.answer, np.int32)
            attempt = _Attempt(self, ask, outcome, until, await self._route(ask, tokens), tokens)
            outcome.attempts += 1
            try:
                async with aclosing(attempt.run()) as answer:
                    async for new in answer:
                        yield new
                return
            except PoolweaveError as error:
                if len(outcome.answer) >= ask.sampling.max_new_tokens:
                    outcome.finish_reason = outcome.finish_reason or "length"
                if outcome.finish_reason is not None:  # the answer is whole, only its end was not heard
                    logger.info("request %s failed after its last token: %s", ask.request_id, error)
                    return
                if not isinstance(error, _ELSEWHERE) or outcome.attempts >= self._config.attempts:
                    raise
                logger.warning("request %s is tried again: %s", ask.request_id, error)
            self.retried += 1
            await asyncio.sleep(_PAUSE_S * outcome.attempts)

    def name(self, ask: Ask) -> str:
        """Of an attempt: unique in the deployment, since KV crosses under it."""
        return f"{ask.request_id}.{self._life}.{next(self._numbers)}"

    def flow(self, route: Route) -> str:
        return "colocated" if route.decode is None else self._config.flow

    def link(self, name: str) -> InstanceLink:
        """Raises PeerLost for one that went since it was chosen: `move_kv` may have taken a while."""
        return self._links.get(name).link

    def first_token(self, route: Route) -> None:
        self._scheduler.prefilled(route.request_id)

    async def move_kv(self, route: Route, ask: Ask) -> None:
        """Have done what the route asks for beside its prompt; wait for what the prompt itself needs."""
        if route.fetch is None and route.replicate is None:
            return
        keys = self._scheduler.holdings.keys(ask.prompt, self._namespace(ask.owner.salt))
        prefix = Prefix(tokens=ask.prompt, owner=ask.owner, keys=keys)
        self.copies.replicate(route, prefix)
        await self.copies.fetch(route, prefix)

    def finished(self, route: Route, ask: Ask, outcome: Outcome) -> None:
        kept = np.array(ask.prompt + outcome.answer[:-1], np.int32)  # the last token's KV was never computed
        self._scheduler.finished(route.request_id, kept, self._namespace(ask.owner.salt))

    def failed(self, route: Route) -> None:
        self._scheduler.failed(route.request_id)

    async def _route(self, ask: Ask, tokens: Int32Array) -> Route:
        """Waits while no instance can be used, but not for ever."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._config.wait_s
        while True:
            namespace = self._namespace(ask.owner.salt)
            try:
                return self._scheduler.route(
                    tokens, ns=namespace, session=ask.session,
                    request_id=self.name(ask), output_tokens=ask.sampling.max_new_tokens,
                )  # fmt: skip
            except NoInstance:
                if loop.time() >= until:
                    raise
                await self._links.change(until - loop.time())

    def _namespace(self, salt: bytes) -> int:
        """Whose prefix it is, as the prompt trees count it; 0 while no instance has said what it serves."""
        model = self._links.model
        if model is None:
            return 0
        if model is not self._named or len(self._namespaces) >= _MOST_NAMES:
            self._named, self._namespaces = model, {}
        namespace = self._namespaces.get(salt)
        if namespace is None:
            digest = replace(model.identity, salt=salt).digest
            namespace = self._namespaces[salt] = self._scheduler.holdings.namespace_of(digest)
        return namespace


class _Attempt:
    """One route of one request."""

    def __init__(
        self, dispatcher: Dispatcher, ask: Ask, outcome: Outcome, until: float, route: Route, tokens: Int32Array
    ) -> None:
        """`tokens`: the prompt and what was answered before."""
        self._dispatcher = dispatcher
        self._ask = ask
        self._outcome = outcome
        self._until = until
        self._route = route
        self._running: InstanceLink | None = None
        left = ask.sampling.max_new_tokens - len(outcome.answer)
        self._job = Job(
            request=route.request_id,
            tokens=pack_tokens(tokens),
            flow=dispatcher.flow(route),
            sampling=replace(ask.sampling, max_new_tokens=left) if outcome.answer else ask.sampling,
            owner=ask.owner,
        )

    async def run(self) -> AsyncGenerator[list[int], None]:
        """Tokens; at its end the outcome has a finish reason. Leaving it early cancels."""
        ended = False
        steps = self._both_phases() if self._route.decode is None else self._two_phases(self._route.decode)
        try:
            await self._dispatcher.move_kv(self._route, self._ask)
            async with aclosing(steps):
                async for tokens in steps:
                    yield tokens
            ended = True
        except DeadlineExceeded:
            raise
        except PoolweaveError:
            self._running = None  # it failed there, or with it: nothing runs that could be cancelled
            raise
        finally:
            if ended:
                self._dispatcher.finished(self._route, self._ask, self._outcome)
            else:
                self._dispatcher.failed(self._route)
                if self._running is not None:
                    self._running.post(Cancel(self._job.request))

    async def _both_phases(self) -> AsyncGenerator[list[int], None]:
        link = self._dispatcher.link(self._route.prefill)
        async for reply in self._phase(link, Complete(self._job)):
            if isinstance(reply, Emit):
                yield reply.tokens
            elif isinstance(reply, Finished):
                self._end(reply.finish_reason, reply.cached_tokens)

    async def _two_phases(self, decode_name: str) -> AsyncGenerator[list[int], None]:
        prefill, decode = self._dispatcher.link(self._route.prefill), self._dispatcher.link(decode_name)
        settled = False  # no KV of this request waits at the decode instance
        reason: str | None = None
        lost: str | None = None
        try:
            async for reply in self._phase(prefill, Prefill(self._job, decode.name)):
                if isinstance(reply, Emit):
                    yield reply.tokens
                elif isinstance(reply, Prefilled):
                    reason, settled = reply.finish_reason, reply.finish_reason is not None
                    lost = reply.lost
                    self._end(reason, reply.cached_tokens)
            if reason is None:
                request = Decode(self._job, self._outcome.answer[-1], prefill.name, lost)
                async for reply in self._phase(decode, request):
                    if isinstance(reply, Emit):
                        yield reply.tokens
                    elif isinstance(reply, Finished):
                        settled = True
                        self._end(reply.finish_reason, self._outcome.cached_tokens)
        finally:
            if not settled:
                decode.post(Discard(self._job.request))

    async def _phase(self, link: InstanceLink, request: Any) -> AsyncGenerator[Any, None]:
        self._running = link
        first = not self._outcome.answer or isinstance(request, (Prefill, Complete))
        async with aclosing(link.stream(request, self._until)) as replies:
            async for reply in replies:
                if isinstance(reply, Emit):
                    self._outcome.answer += reply.tokens
                    if reply.finish_reason in _ENDS[type(request)]:
                        self._outcome.finish_reason = reply.finish_reason
                    if first:
                        first = False
                        self._dispatcher.first_token(self._route)
                yield reply

    def _end(self, reason: str | None, cached_tokens: int) -> None:
        self._outcome.finish_reason = reason
        if self._outcome.attempts == 1:  # of the prompt as the client sent it
            self._outcome.cached_tokens = cached_tokens
