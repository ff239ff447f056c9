from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from poolweave.errors import ConfigError
from poolweave.serving.simulator import (
    Flow,
    InstanceGroup,
    Simulation,
    SimulationConfig,
    llama2_13b_on_two_h800,
)
from poolweave.serving.simulator.conversations import Conversations
from poolweave.serving.simulator.trace_files import load_loogle, load_trace
from poolweave.serving.simulator.traces import SharedPrefixes, TokenSource, Trace, in_order
from poolweave.types import Role

RECORDED = {
    "mooncake": ("mooncake_conversation_trace.jsonl.xz", 12_031, 12_035, 0.374),
    "azure": ("AzureLLMInferenceTrace_conv.csv.xz", 19_366, 1_155, 0.0),
    "sharegpt": ("sharegpt_multiturn.jsonl.xz", 215, 975, 0.89),
    "loogle": ("loogle_longdep_qa.jsonl.xz", 43, 19_072, 0.886),
    "react": ("react_hotpotqa_trial1.jsonl.xz", 381, 1_671, 0.925),  # words and signs, not a model's tokens
}


@pytest.mark.parametrize("kind", sorted(RECORDED))
def test_recorded_traces_have_their_known_lengths_and_reuse(kind: str, recorded: Callable[[str], Path]) -> None:
    name, requests, mean_tokens, reuse = RECORDED[kind]
    trace = load_trace(kind, recorded(name))
    assert len(trace.requests) == requests
    assert trace.prompt_tokens / requests == pytest.approx(mean_tokens, rel=0.002)
    assert trace.reuse() == pytest.approx(reuse, abs=0.005)


def test_tokens_are_those_of_their_label() -> None:
    source = TokenSource(16)
    assert source.tokens("a", 100).tolist() == TokenSource(32).tokens("a", 300)[:100].tolist()
    assert source.tokens("a", 100).tolist() != source.tokens("b", 100).tolist()


def test_request_of_parts() -> None:
    source = TokenSource(16)
    request = source.request(1.0, [source.tokens("a", 20), source.tokens("b", 20)], source.tokens("c", 8), "s")
    assert (request.num_tokens, request.output_tokens, len(request.keys), len(request.answer_keys)) == (40, 8, 2, 3)
    assert request.answer_keys[:2].tolist() == request.keys.tolist()
    assert len(request.cache_tokens) == 6
    assert request.cache_tokens.min() >= 0


def test_poisson_arrivals_keep_the_order() -> None:
    trace = SharedPrefixes(share=0.5, num_requests=2_000, prompt_tokens=32).trace()
    moved = trace.at_rate(10.0, seed=4)
    assert [r.keys.tolist() for r in moved.requests] == [r.keys.tolist() for r in trace.requests]
    arrivals = np.array([r.arrival_s for r in moved.requests])
    assert arrivals[-1] == pytest.approx(200, rel=0.1)
    assert np.diff(arrivals).std() == pytest.approx(0.1, rel=0.1)
    assert moved.at_rate(10.0, seed=4).requests[7].arrival_s == moved.requests[7].arrival_s
    assert moved.head(3).requests == moved.requests[:3]
    with pytest.raises(ConfigError, match="rate"):
        trace.at_rate(0.0)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_made_up_share_is_the_reuse(share: float) -> None:
    made = SharedPrefixes(share=share, num_requests=400, prompt_tokens=1600, prefixes=4)
    assert made.trace().reuse() == pytest.approx(share, abs=0.03)


def test_loogle_copies_are_other_documents(tmp_path: Path) -> None:
    questions = [{"Q": "?", "A": "!", "q_tokens": 30, "a_tokens": 5}] * 4
    record = {"title": "T", "doc_tokens_qwen": 320, "qa": questions, "input": "..."}
    path = tmp_path / "loogle.jsonl.xz"
    path.write_bytes(lzma.compress(json.dumps(record).encode()))
    trace = load_loogle(path, copies=3, turns=2)
    assert len(trace.requests) == 12
    assert len({r.session for r in trace.requests}) == 6
    assert len({int(r.keys[0]) for r in trace.requests}) == 3
    assert [int(r.keys[0]) for r in trace.requests[:3]] == [int(r.keys[0]) for r in trace.requests[3:6]]


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of mooncake"):
        load_trace("moonbase", tmp_path)
    with pytest.raises(ConfigError, match="no trace file"):
        load_trace("azure", tmp_path / "absent.csv")
    source = TokenSource(16)
    late, early = (source.request(at, [source.tokens("a", 4)], source.tokens("b", 2)) for at in (2.0, 1.0))
    with pytest.raises(ConfigError, match="order of arrival"):
        Trace(name="t", block_tokens=16, requests=(late, early))
    assert in_order("t", 16, [late, early]).requests == (early, late)
    empty = source.request(0.0, [source.tokens("a", 4)], source.tokens("b", 0))
    with pytest.raises(ConfigError, match="at least 1"):
        Trace(name="t", block_tokens=16, requests=(empty,))
    with pytest.raises(ConfigError, match="share"):
        SharedPrefixes(share=1.5)


def test_a_turn_of_a_conversation_begins_with_all_that_was_said_before() -> None:
    trace = Conversations(sessions=2, turns=3, first_tokens=64, question_tokens=32, answer_tokens=48).trace()
    first, second, third = (request for request in trace.requests if request.session == "session-0")
    assert [r.num_tokens for r in (first, second, third)] == [64, 64 + 48 + 32, 64 + 2 * (48 + 32)]
    assert (second.keys[: len(first.answer_keys)] == first.answer_keys).all()
    assert (third.keys[: len(second.answer_keys)] == second.answer_keys).all()
    other = next(request for request in trace.requests if request.session == "session-1")
    assert not set(other.keys.tolist()) & set(third.keys.tolist())
    with pytest.raises(ConfigError, match="above zero"):
        Conversations(sessions=0)


def test_answers_that_are_sent_back_are_found_by_the_next_turn() -> None:
    """Fig. 8: each flow finds more, or sends less, than the one before it."""
    trace = Conversations(sessions=6, turns=4, first_tokens=256, question_tokens=64, answer_tokens=128).trace()
    groups = (InstanceGroup(role=Role.PREFILL), InstanceGroup(role=Role.DECODE))
    reports = [
        Simulation(
            SimulationConfig(device=llama2_13b_on_two_h800(), instances=groups, flow=flow), trace.at_rate(1.0)
        ).run()
        for flow in Flow
    ]
    basic, first, second, third = reports
    assert basic.hit_ratio == 0.0 < first.hit_ratio == second.hit_ratio < third.hit_ratio
    assert second.moved_bytes < first.moved_bytes
    assert third.ttft.mean < second.ttft.mean < basic.ttft.mean
