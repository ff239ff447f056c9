"""One request on its way through the instances: its events as they come, its record at the end.

Drives the two phases by control messages and keeps the times; knows no process and no pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TypeAlias, cast

from poolweave.errors import PoolweaveError
from poolweave.serving.control.messages import (
    Cancel,
    Complete,
    Decode,
    Discard,
    Emit,
    ErrorInfo,
    Finished,
    Job,
    Prefill,
    Prefilled,
    Reply,
    Request,
    Sent,
)
from poolweave.serving.instance.client import InstanceClient

Clock: TypeAlias = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Route:
    """The instances of one request; `decode` is None where one does both phases."""

    prefill: InstanceClient
    decode: InstanceClient | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What a request cost. Times are seconds from its start; `to_prefill` is empty in flows that send nothing back.

    `cached_tokens` of the prompt were found at the prefill instance, `matched_blocks` of those offered were at the
    decode instance already. `hand_over_error` says why the prompt's KV did not get there, so that it was computed
    again; `return_error` why the answer's KV did not get back: the answer itself is complete.
    """

    request: str
    flow: str
    num_prompt: int
    answer: tuple[int, ...]
    finish_reason: str
    cached_tokens: int
    to_decode: Sent
    to_prefill: Sent
    ttft_s: float
    jct_s: float
    return_error: PoolweaveError | None = None
    hand_over_error: PoolweaveError | None = None

    @property
    def matched_blocks(self) -> int:
        return self.to_decode.num_blocks - self.to_decode.pulled_blocks

    @property
    def tpot_s(self) -> float:
        """Mean seconds a token after the first; 0 for an answer of one."""
        return (self.jct_s - self.ttft_s) / max(1, len(self.answer) - 1)


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the answer, the `index`-th, `at_s` seconds after the request's start."""

    token: int
    index: int
    at_s: float


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The prompt's KV lies at the decode instance, or is computed again there: then nothing was `sent`."""

    cached_tokens: int
    sent: Sent
    at_s: float


@dataclass(frozen=True, slots=True)
class End:
    """The last event of every request that did not fail."""

    record: RequestRecord


Event: TypeAlias = Token | HandedOver | End


class Generation:
    """Iterate it for its events, once. Work goes on as the iteration does; leaving it early cancels the request.

    Raises while iterating: RequestRefused, OutOfBlocks, TransferFailed, PeerLost, DeadlineExceeded, as the instances
    report them. The other requests are not affected.
    """

    def __init__(self, job: Job, route: Route, *, timeout_s: float, clock: Clock = time.monotonic) -> None:
        self.request = job.request
        self.record: RequestRecord | None = None  # once the End event came
        self._job = job
        self._route = route
        self._clock = clock
        self._start = clock()
        self._deadline = self._start + timeout_s
        self._answer: list[int] = []
        self._first_s = self._last_s = 0.0
        self._running: InstanceClient | None = None
        self._cancelled = False
        self._events = self._run()

    @property
    def one_instance(self) -> bool:
        """Both phases run on one instance: there is no HandedOver event."""
        return self._route.decode is None

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def cancel(self) -> None:
        """End the request where it runs; its record then says "cancelled". Any thread; harmless after the end."""
        self._cancelled = True
        running = self._running
        if running is not None:
            running.post(Cancel(self.request))

    def result(self) -> RequestRecord:
        """Wait for the end, passing over events not yet seen. Raises what iterating raises."""
        for event in self._events:
            if isinstance(event, End):
                return event.record
        if self.record is None:
            raise PoolweaveError(f"request {self.request} failed or was left before result() was called")
        return self.record

    def _run(self) -> Iterator[Event]:
        steps = self._both_phases() if self._route.decode is None else self._two_phases(self._route.decode)
        ended = False
        try:
            yield from steps
            ended = True
        finally:
            if not ended:
                self.cancel()
            self._running = None

    def _both_phases(self) -> Iterator[Event]:
        finished = yield from self._phase(self._route.prefill, Complete(self._job))
        assert isinstance(finished, Finished)
        yield self._end(finished.finish_reason, Prefilled(cached_tokens=finished.cached_tokens, sent=Sent()), finished)

    def _two_phases(self, decode: InstanceClient) -> Iterator[Event]:
        prefill = self._route.prefill
        decode.require()  # before a prompt is computed for nobody
        finished: Finished | None = None
        settled = False  # no KV of this request waits at the decode instance
        try:
            prefilled = yield from self._phase(prefill, Prefill(self._job, decode.peer))
            assert isinstance(prefilled, Prefilled)
            reason = prefilled.finish_reason
            settled = reason is not None
            if reason is None and self._cancelled:
                reason = "cancelled"
            if reason is None:
                yield HandedOver(prefilled.cached_tokens, prefilled.sent, self._elapsed())
                request = Decode(self._job, self._answer[0], prefill.peer, prefilled.lost)
                reply = yield from self._phase(decode, request)
                assert isinstance(reply, Finished)
                finished, reason = reply, reply.finish_reason
                settled = True
        finally:
            if not settled:
                decode.post(Discard(self.request))
        yield self._end(reason, prefilled, finished)

    def _phase(self, client: InstanceClient, request: Request) -> Generator[Event, None, Reply]:
        """Token events of one phase; returns its final reply."""
        self._running = client
        remaining = max(0.001, self._deadline - self._clock())
        for reply in client.stream(request, timeout_s=remaining):
            if not isinstance(reply, Emit):
                return cast(Reply, reply)
            for token in reply.tokens:
                yield self._token(token)
        raise AssertionError("a stream ends with a final reply or raises")

    def _token(self, token: int) -> Token:
        self._last_s = self._elapsed()
        if not self._answer:
            self._first_s = self._last_s
        self._answer.append(token)
        return Token(token, len(self._answer) - 1, self._last_s)

    def _elapsed(self) -> float:
        return self._clock() - self._start

    def _end(self, reason: str, prefilled: Prefilled, finished: Finished | None) -> End:
        self.record = RequestRecord(
            request=self.request,
            flow=self._job.flow,
            num_prompt=len(self._job.tokens) // 4,
            answer=tuple(self._answer),
            finish_reason=reason,
            cached_tokens=prefilled.cached_tokens,
            to_decode=prefilled.sent,
            to_prefill=finished.sent if finished else Sent(),
            ttft_s=self._first_s,
            jct_s=self._last_s,
            return_error=_error(finished.sent_error if finished else None),
            hand_over_error=_error(prefilled.sent_error),
        )
        return End(self.record)


def _error(info: ErrorInfo | None) -> PoolweaveError | None:
    return info.error() if info is not None else None
