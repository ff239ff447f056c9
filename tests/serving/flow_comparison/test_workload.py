"""Sessions over a server that answers by rote: order of requests, history, failures, and the report made of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from poolweave.errors import RequestRefused
from poolweave.serving.control.messages import Sent
from poolweave.serving.engine.sequence import SamplingParams
from poolweave.serving.flow_comparison.report import Moved, Times, make_report
from poolweave.serving.flow_comparison.sessions import Session
from poolweave.serving.flow_comparison.workload import TurnResult, Workload
from poolweave.serving.generation import End, Event, HandedOver, RequestRecord, Token

BLOCK = 4


class Words:
    """A talk of one token a letter; an answer is closed by token 0."""

    def opening(self, user: str, system: str | None = None) -> list[int]:
        return [ord(letter) for letter in (system or "") + user]

    def delta(self, user: str, answer: Sequence[int]) -> list[int]:
        return [0, *map(ord, user)]


class Rote:
    """Answers every prompt with its last two tokens, as basic disaggregation or one instance would."""

    def __init__(self, one_instance: bool = False, refuse: str = "") -> None:
        self.one_instance = one_instance
        self.prompts: list[list[int]] = []
        self.tenants: set[bytes] = set()
        self.open = 0
        self.most_open = 0
        self._refuse = [ord(letter) for letter in refuse]
        self._lock = threading.Lock()

    def generate(self, tokens: Any, sampling: Any, flow: str, *, tenant: bytes, timeout_s: float) -> Any:
        self.prompts.append(list(tokens))
        self.tenants.add(tenant)
        return _Answer(self, list(tokens), flow)

    def enter(self, change: int) -> None:
        with self._lock:
            self.open += change
            self.most_open = max(self.most_open, self.open)


class _Answer:
    def __init__(self, rote: Rote, prompt: list[int], flow: str) -> None:
        self.one_instance = rote.one_instance
        self._rote, self._prompt, self._flow = rote, prompt, flow

    def __iter__(self) -> Iterator[Event]:
        if self._rote._refuse and self._prompt[-len(self._rote._refuse) :] == self._rote._refuse:
            raise RequestRefused("too long", needed=len(self._prompt), limit=3)
        self._rote.enter(1)
        blocks = -(-len(self._prompt) // BLOCK)
        sent = (
            Sent() if self.one_instance else Sent(num_blocks=blocks, pulled_blocks=blocks, nbytes=blocks * 100, calls=2)
        )
        yield Token(self._prompt[-2], 0, 0.25)
        if not self.one_instance:
            yield HandedOver(0, sent, 0.3)
        yield Token(self._prompt[-1], 1, 0.5)
        self._rote.enter(-1)
        yield End(
            RequestRecord(
                request="r", flow=self._flow, num_prompt=len(self._prompt), answer=tuple(self._prompt[-2:]),
                finish_reason="length", cached_tokens=0, to_decode=sent, to_prefill=Sent(), ttft_s=0.25, jct_s=0.5,
            )
        )  # fmt: skip


SESSIONS = (
    Session(name="a", turns=("hello", "more"), system="S"),
    Session(name="b", turns=("good day", "and", "bye")),
)


def load(**changes: Any) -> Workload:
    settings: dict[str, Any] = {"sessions": SESSIONS, "talk": Words(), "sampling": SamplingParams(), **changes}
    return Workload(**settings)


def test_a_prompt_is_history_answer_and_delta() -> None:
    rote = Rote()
    rounds = load().run(rote, "pd-basic")
    first = [ord(letter) for letter in "Shello"]
    assert rounds[0][0].prompt == tuple(first)
    assert rounds[1][0].prompt == (*first, ord("l"), ord("o"), 0, *map(ord, "more"))
    assert [[result.session for result in turn] for turn in rounds] == [["a", "b"], ["a", "b"], ["b"]]
    assert rote.tenants == {b"pd-basic"}


def test_requests_are_counted_and_told_of() -> None:
    told: list[TurnResult] = []
    workload = load(on_request=told.append)
    workload.run(Rote(), "pd-basic")
    assert workload.num_requests == len(told) == 5


@pytest.mark.parametrize("one_instance", [True, False])
def test_a_failed_request_ends_its_session_alone(one_instance: bool) -> None:
    rounds = load().run(Rote(one_instance, refuse="more"), "pd-basic")
    assert [(r.session, r.turn) for turn in rounds for r in turn if r.record] == [
        ("a", 0),
        ("b", 0),
        ("b", 1),
        ("b", 2),
    ]
    failed = rounds[1][0]
    assert isinstance(failed.error, RequestRefused)
    report = make_report({"pd-basic": rounds}, BLOCK, 100)
    assert report.flows[0].failures == ("a turn 2: too long",)
    assert not report.complete


def test_the_report_adds_up_and_agrees_with_the_oracle() -> None:
    rounds = load().run(Rote(), "pd-basic")
    report = make_report({"pd-basic": rounds}, BLOCK, 100)
    (flow,) = report.flows
    blocks = sum(-(-len(result.prompt) // BLOCK) for turn in rounds for result in turn)
    assert flow.to_decode == Moved(nbytes=blocks * 100, calls=10, blocks=blocks, matched_blocks=0)
    assert flow.to_prefill == Moved(nbytes=0, calls=0, blocks=0, matched_blocks=0)
    assert (flow.requests, flow.answer_tokens, len(flow.turns)) == (5, 10, 3)
    assert flow.turns[0].prompt_tokens == len("Shello") + len("good day")
    assert flow.ttft == Times(0.25, 0.25, 0.25)
    assert report.as_predicted
    assert report.complete


def test_a_figure_that_is_not_the_oracles_is_named() -> None:
    rounds = load().run(Rote(), "pd-basic")
    report = make_report({"pd-caching-1": rounds}, BLOCK, 100)
    assert not report.as_predicted
    assert "pd-caching-1, a turn 2: cached tokens 0, predicted 4" in report.flows[0].surprises


def test_bytes_that_are_not_the_oracles_are_named() -> None:
    rounds = load().run(Rote(), "pd-basic")
    report = make_report({"pd-basic": rounds}, BLOCK, 99)
    assert "pd-basic, a turn 1: bytes P->D 200, predicted 198" in report.flows[0].surprises


def test_flows_with_other_tokens_are_named() -> None:
    same, other = load().run(Rote(), "pd-basic"), load(sessions=SESSIONS[:1]).run(Rote(), "colocated")
    assert make_report({"pd-basic": same, "colocated": other}, BLOCK, 100).differing == ()
    changed = load(sessions=(Session(name="a", turns=("hello", "none")),)).run(Rote(), "colocated")
    report = make_report({"pd-basic": same, "colocated": changed}, BLOCK, 100)
    assert report.differing == (
        "a turn 1: colocated differs from pd-basic",
        "a turn 2: colocated differs from pd-basic",
    )


def test_times_of_no_request_are_zero() -> None:
    assert Times.of([]) == Times(0.0, 0.0, 0.0)
