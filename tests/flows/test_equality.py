"""Every flow answers token for token what `transformers` does without any cache, and reuses exactly what it must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")

from ref_transformers import greedy, prompt_of

from poolweave.serving.cluster import LocalCluster
from poolweave.serving.engine.sequence import SamplingParams
from poolweave.serving.flow_comparison.report import FlowReport, make_report
from poolweave.serving.flow_comparison.sessions import Session
from poolweave.serving.flow_comparison.workload import Workload
from poolweave.serving.generation import End, HandedOver, RequestRecord, Token
from poolweave.serving.instance.flows import FLOWS

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(900)]

LENGTHS = (1, 15, 16, 17, 500)
NUM_TOKENS = 8
KINDS = ["llama", "qwen3moe", "mixtral", pytest.param("smollm2", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def cluster(kind: str, clusters: Callable[..., LocalCluster]) -> LocalCluster:
    return clusters(kind)


def answers(cluster: LocalCluster, prompts: Sequence[Sequence[int]], flow: str, tenant: bytes) -> list[RequestRecord]:
    """All prompts at once, a thread each."""
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)

    def ask(prompt: Sequence[int]) -> RequestRecord:
        return cluster.generate(prompt, sampling, flow, tenant=tenant, timeout_s=120).result()

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(ask, prompts))


@pytest.mark.parametrize("flow", FLOWS)
def test_greedy_tokens_are_those_of_transformers_cold_and_cached(
    cluster: LocalCluster, kind: str, flow: str, model_folder: Callable[[str], Path]
) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    expected = [tuple(greedy(model_folder(kind), tuple(prompt), NUM_TOKENS)) for prompt in prompts]
    cold = answers(cluster, prompts, flow, flow.encode())
    assert [record.answer for record in cold] == expected
    again = answers(cluster, prompts, flow, flow.encode())
    assert [record.answer for record in again] == expected
    reused = 0 if flow == "pd-basic" else 1
    assert [record.cached_tokens for record in again] == [reused * ((length - 1) // 16 * 16) for length in LENGTHS]


class Letters:
    """A talk of raw tokens: a turn is a number, its seed and length."""

    def opening(self, user: str, system: str | None = None) -> list[int]:
        return [*(prompt_of(int(system)) if system else []), *prompt_of(int(user), seed=1)]

    def delta(self, user: str, answer: Sequence[int]) -> list[int]:
        return prompt_of(int(user), seed=2)


SESSIONS = (
    Session(name="long", system="40", turns=("21", "9", "30")),
    Session(name="shares its start", system="40", turns=("30", "17", "3")),
    Session(name="short", turns=("5", "4", "7", "16")),
    Session(name="whole blocks", turns=("32", "12")),
)


@pytest.fixture(scope="module")
def reports(cluster: LocalCluster, kind: str, model_folder: Callable[[str], Path]) -> dict[str, FlowReport]:
    """All flows over the sessions, held against the oracle, each other and `transformers`."""
    sampling = SamplingParams(max_new_tokens=13, ignore_eos=True)
    load = Workload(sessions=SESSIONS, talk=Letters(), sampling=sampling)
    runs = {flow: load.run(cluster, flow) for flow in FLOWS}
    welcome = cluster.welcome()
    report = make_report(runs, welcome.block_tokens, welcome.block_bytes)
    assert report.complete, [flow.failures for flow in report.flows]
    assert report.differing == ()
    for turn in runs["pd-caching-3"]:
        for result in turn:
            assert result.record is not None
            assert list(result.record.answer) == greedy(model_folder(kind), result.prompt, 13)
    return {flow.flow: flow for flow in report.flows}


@pytest.mark.parametrize("flow", FLOWS)
def test_measured_reuse_and_bytes_are_the_oracles(reports: dict[str, FlowReport], flow: str) -> None:
    assert reports[flow].surprises == ()
    assert reports[flow].requests == sum(len(session.turns) for session in SESSIONS)


def test_the_flows_differ_as_the_paper_says(reports: dict[str, FlowReport]) -> None:
    """-3 alone finds D's answers at P; -2 and -3 send only what D lacks; basic reuses nothing."""
    cached = {name: [turn.cached_tokens for turn in flow.turns] for name, flow in reports.items()}
    assert cached["pd-basic"] == [0, 0, 0, 0]
    assert cached["pd-caching-1"] == cached["pd-caching-2"]
    assert cached["pd-caching-3"] == cached["colocated"]
    assert all(a > b for a, b in zip(cached["pd-caching-3"][1:], cached["pd-caching-2"][1:], strict=True))
    there = {name: flow.to_decode.nbytes for name, flow in reports.items()}
    assert there["pd-basic"] == there["pd-caching-1"] > 2 * there["pd-caching-2"]
    assert there["pd-caching-3"] == there["pd-caching-2"]
    assert {name for name, flow in reports.items() if flow.to_prefill.nbytes} == {"pd-caching-3"}
    assert reports["pd-caching-1"].to_decode.matched_blocks == 0
    assert reports["pd-caching-2"].to_decode.matched_blocks > 0


def test_events_come_in_order_with_rising_times(cluster: LocalCluster) -> None:
    prompt = prompt_of(40)
    generation = cluster.generate(prompt, SamplingParams(max_new_tokens=4, ignore_eos=True), "pd-caching-3")
    events = list(generation)
    kinds = [type(event) for event in events]
    assert kinds == [Token, HandedOver, Token, Token, Token, End]
    tokens = [event for event in events if isinstance(event, Token)]
    assert [token.index for token in tokens] == [0, 1, 2, 3]
    assert sorted(tokens, key=lambda token: token.at_s) == tokens
    end = events[-1]
    assert isinstance(end, End)
    assert end.record.answer == tuple(token.token for token in tokens)
    assert (end.record.ttft_s, end.record.jct_s) == (tokens[0].at_s, tokens[-1].at_s)


@pytest.mark.parametrize("flow", ["pd-basic", "pd-caching-3", "colocated"])
def test_an_answer_of_one_token_ends_at_the_prefill_instance(cluster: LocalCluster, flow: str) -> None:
    record = cluster.generate(prompt_of(20), SamplingParams(max_new_tokens=1, ignore_eos=True), flow).result()
    assert len(record.answer) == 1
    assert record.finish_reason == "length"
    assert record.to_decode.num_blocks == 0


def test_a_seed_gives_the_same_draws_in_every_flow(cluster: LocalCluster) -> None:
    """Both phases draw from the request's seed, by position: where they run does not matter."""
    sampling = SamplingParams(max_new_tokens=8, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True)
    drawn = {flow: cluster.generate(prompt_of(30), sampling, flow).result().answer for flow in FLOWS}
    assert len(set(drawn.values())) == 1
    other = SamplingParams(max_new_tokens=8, temperature=1.0, top_p=0.9, seed=6, ignore_eos=True)
    assert cluster.generate(prompt_of(30), other).result().answer != drawn["pd-basic"]


def test_tenants_do_not_see_each_other(cluster: LocalCluster) -> None:
    sampling = SamplingParams(max_new_tokens=3, ignore_eos=True)
    records = [
        cluster.generate(prompt_of(48, seed=9), sampling, "pd-caching-3", tenant=tenant).result()
        for tenant in (b"one", b"two", b"one")
    ]
    assert [record.cached_tokens for record in records] == [0, 0, 32]
    assert [record.matched_blocks for record in records] == [0, 0, 3]
    assert len({record.answer for record in records}) == 1


def test_nothing_stays_in_use_between_requests(cluster: LocalCluster) -> None:
    """No block is active, lent or in limbo once every request has ended; history is all that remains."""
    for member in cluster.members:
        report = cluster.stats(member.name)
        figures = report.pool["hbm"]
        assert (report.jobs, figures["active"], figures["leased"], figures["limbo"]) == (0, 0, 0, 0), member.name
