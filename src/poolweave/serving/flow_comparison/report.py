"""What a run of all flows showed: figures a flow, and whether they are what they must be. Pure; draws nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from poolweave.serving.control.messages import Sent
from poolweave.serving.flow_comparison.oracle import predict
from poolweave.serving.flow_comparison.workload import TurnResult

Rounds = Sequence[Sequence[TurnResult]]


@dataclass(frozen=True, slots=True)
class Times:
    """Of all requests of a flow, in seconds."""

    mean_s: float
    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Times:
        """Zeros for no values."""
        if not values:
            return cls(0.0, 0.0, 0.0)
        p50, p99 = np.percentile(values, (50, 99))
        return cls(float(np.mean(values)), float(p50), float(p99))


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of all sessions: tokens of their prompts, and how many of those were cached."""

    prompt_tokens: int
    cached_tokens: int

    @property
    def ratio(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class Moved:
    """All transfers in one direction. `matched_blocks` were offered but already there."""

    nbytes: int
    calls: int
    blocks: int
    matched_blocks: int

    @classmethod
    def of(cls, sent: Sequence[Sent]) -> Moved:
        return cls(
            nbytes=sum(one.nbytes for one in sent),
            calls=sum(one.calls for one in sent),
            blocks=sum(one.pulled_blocks for one in sent),
            matched_blocks=sum(one.num_blocks - one.pulled_blocks for one in sent),
        )


@dataclass(frozen=True, slots=True)
class FlowReport:
    """All of one flow. `surprises`: each figure that differs from the oracle's, in words; none when reuse is exact."""

    flow: str
    requests: int
    failures: tuple[str, ...]
    answer_tokens: int
    turns: tuple[Turn, ...]
    to_decode: Moved
    to_prefill: Moved
    ttft: Times
    jct: Times
    surprises: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """All flows of one run. `differing`: each request whose tokens are not the same in all flows, in words."""

    flows: tuple[FlowReport, ...]
    differing: tuple[str, ...]

    @property
    def as_predicted(self) -> bool:
        """Every measured figure equals the oracle's."""
        return not any(flow.surprises for flow in self.flows)

    @property
    def complete(self) -> bool:
        """No request failed."""
        return not any(flow.failures for flow in self.flows)


def make_report(runs: Mapping[str, Rounds], block_tokens: int, block_bytes: int) -> Report:
    """`runs` by flow name, as Workload.run gives them."""
    flows = tuple(_flow_report(flow, rounds, block_tokens, block_bytes) for flow, rounds in runs.items())
    return Report(flows, _differing(runs))


def _flow_report(flow: str, rounds: Rounds, block_tokens: int, block_bytes: int) -> FlowReport:
    results = [result for turn in rounds for result in turn]
    records = [result.record for result in results if result.record is not None]
    return FlowReport(
        flow=flow,
        requests=len(results),
        failures=tuple(f"{r.session} turn {r.turn + 1}: {r.error}" for r in results if r.error is not None),
        answer_tokens=sum(len(record.answer) for record in records),
        turns=tuple(turn_of(turn) for turn in rounds),
        to_decode=Moved.of([record.to_decode for record in records]),
        to_prefill=Moved.of([record.to_prefill for record in records]),
        ttft=Times.of([record.ttft_s for record in records]),
        jct=Times.of([record.jct_s for record in records]),
        surprises=surprises(flow, rounds, block_tokens, block_bytes),
    )


def surprises(flow: str, rounds: Rounds, block_tokens: int, block_bytes: int) -> tuple[str, ...]:
    """Each measured figure that is not the oracle's. A failed request tells nothing of what it left behind: it and
    all that ran after it are not compared."""
    whole = 0
    while whole < len(rounds) and all(result.record is not None for result in rounds[whole]):
        whole += 1
    expected = predict(flow, [[result.asked() for result in turn] for turn in rounds[:whole]], block_tokens)
    found = []
    for results, predictions in zip(rounds[:whole], expected, strict=True):
        for result, oracle in zip(results, predictions, strict=True):
            assert result.record is not None
            figures = (
                ("cached tokens", result.record.cached_tokens, oracle.cached_tokens),
                ("bytes P->D", result.record.to_decode.nbytes, oracle.blocks_to_decode * block_bytes),
                ("bytes D->P", result.record.to_prefill.nbytes, oracle.blocks_to_prefill * block_bytes),
            )
            found += [
                f"{flow}, {result.session} turn {result.turn + 1}: {what} {measured}, predicted {predicted}"
                for what, measured, predicted in figures
                if measured != predicted
            ]
    return tuple(found)


def turn_of(results: Sequence[TurnResult]) -> Turn:
    """Of the requests that were answered."""
    done = [result for result in results if result.record is not None]
    return Turn(
        prompt_tokens=sum(len(result.prompt) for result in done),
        cached_tokens=sum(result.record.cached_tokens for result in done if result.record is not None),
    )


def _differing(runs: Mapping[str, Rounds]) -> tuple[str, ...]:
    """Requests whose prompt or answer differs from the first flow's, by session and turn."""
    answers = {
        flow: {(r.session, r.turn): (r.prompt, r.record.answer) for turn in rounds for r in turn if r.record}
        for flow, rounds in runs.items()
    }
    found = []
    first, *others = answers
    for flow in others:
        for place in answers[first].keys() & answers[flow].keys():
            if answers[first][place] != answers[flow][place]:
                found.append(f"{place[0]} turn {place[1] + 1}: {flow} differs from {first}")
    return tuple(sorted(found))
