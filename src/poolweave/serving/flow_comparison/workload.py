"""Sessions over a cluster, flow by flow: who asks when, what was answered, what it cost. Prints nothing.

A session's next prompt is its history, its answer and the user's next words, so turns of one session follow each
other. All sessions' requests of one turn overlap: each starts when the one before it has handed its prompt over, and
the next turn starts when all answers are complete. That order makes reuse exact (see oracle.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from poolweave.errors import PoolweaveError
from poolweave.serving.engine.sequence import SamplingParams
from poolweave.serving.flow_comparison.oracle import Asked
from poolweave.serving.flow_comparison.sessions import Session
from poolweave.serving.generation import End, Event, Generation, HandedOver, RequestRecord, Token
from poolweave.types import TokenIds


class Server(Protocol):
    """What runs requests: LocalCluster does."""

    def generate(
        self, tokens: TokenIds, sampling: SamplingParams | None, flow: str, *, tenant: bytes, timeout_s: float
    ) -> Generation: ...


class Talk(Protocol):
    """What turns words into tokens: Chat does."""

    def opening(self, user: str, system: str | None = None) -> list[int]: ...

    def delta(self, user: str, answer: Sequence[int]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One request of a session: its prompt, and either its record or what it failed with."""

    session: str
    turn: int
    prompt: tuple[int, ...]
    record: RequestRecord | None
    error: PoolweaveError | None = None

    def asked(self) -> Asked:
        """As the oracle takes it; only for a request that did not fail."""
        assert self.record is not None
        return Asked(prompt=self.prompt, answer=self.record.answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked of each flow. `on_request` is called after each request, `on_event` for each
    event of one with its session and turn, both from several threads."""

    sessions: tuple[Session, ...]
    talk: Talk
    sampling: SamplingParams
    timeout_s: float = 120.0
    on_request: Callable[[TurnResult], None] = lambda result: None
    on_event: Callable[[str, int, Event], None] = lambda session, turn, event: None

    @property
    def num_requests(self) -> int:
        """Of one flow, when none fails."""
        return sum(len(session.turns) for session in self.sessions)

    def run(self, server: Server, flow: str) -> list[list[TurnResult]]:
        """All turns of all sessions, one list a turn. A request that fails ends its session, not the run.

        Each flow is a tenant of its own: it starts cold, whatever ran before it.
        """
        histories = [_History(session) for session in self.sessions]
        num_turns = max((len(session.turns) for session in self.sessions), default=0)
        with ThreadPoolExecutor(max(1, len(histories)), thread_name_prefix="session") as threads:
            return [self._turn(server, flow, turn, histories, threads) for turn in range(num_turns)]

    def _turn(
        self, server: Server, flow: str, turn: int, histories: list[_History], threads: ThreadPoolExecutor
    ) -> list[TurnResult]:
        running: list[Future[TurnResult]] = []
        for history in histories:
            if history.failed or turn >= len(history.session.turns):
                continue
            history.ask(self.talk, turn)
            request = _Request(self, history, turn)
            running.append(threads.submit(request.run, server, flow))
            request.handed_over.wait()
        return [future.result() for future in running]


@dataclass(slots=True)
class _History:
    """The tokens of one session so far; whoever runs its request owns it."""

    session: Session
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    failed: bool = False

    def ask(self, talk: Talk, turn: int) -> None:
        """Grow into the prompt of `turn`: tokens that were, the answer's, the new ones; never tokenized again."""
        user = self.session.turns[turn]
        if turn == 0:
            self.prompt = talk.opening(user, self.session.system)
        else:
            self.prompt = [*self.prompt, *self.answer, *talk.delta(user, self.answer)]


class _Request:
    """One turn of one session. `handed_over` is set when the next session's may start, at the latest at its end."""

    def __init__(self, workload: Workload, history: _History, turn: int) -> None:
        self.handed_over = threading.Event()
        self._workload = workload
        self._history = history
        self._turn = turn

    def run(self, server: Server, flow: str) -> TurnResult:
        record = error = None
        try:
            record = self._generate(server, flow)
            self._history.answer = list(record.answer)
        except PoolweaveError as failure:
            error = failure
            self._history.failed = True
        finally:
            self.handed_over.set()
        prompt = tuple(self._history.prompt)
        result = TurnResult(self._history.session.name, self._turn, prompt, record, error)
        self._workload.on_request(result)
        return result

    def _generate(self, server: Server, flow: str) -> RequestRecord:
        load = self._workload
        generation = server.generate(
            self._history.prompt, load.sampling, flow, tenant=flow.encode(), timeout_s=load.timeout_s
        )
        for event in generation:
            load.on_event(self._history.session.name, self._turn, event)
            if isinstance(event, End):
                return event.record
            if isinstance(event, HandedOver) or (isinstance(event, Token) and generation.one_instance):
                self.handed_over.set()
        raise AssertionError("a generation ends with its record or raises")
