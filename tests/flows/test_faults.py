"""What goes wrong in real processes: bad requests, cancelled ones, instances that die, and what stays behind."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ref_waiting import PATIENCE_S, until

pytest.importorskip("torch")

from ref_transformers import greedy, prompt_of

from poolweave.errors import (
    ConfigError,
    DeadlineExceeded,
    OutOfBlocks,
    PeerLost,
    PoolweaveError,
    RequestRefused,
    TransferFailed,
)
from poolweave.serving.cluster import LocalCluster, Member
from poolweave.serving.engine.sequence import SamplingParams
from poolweave.serving.generation import Generation, HandedOver, Token
from poolweave.serving.instance.config import ClusterConfig
from poolweave.types import Role

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(900)]

SHORT = SamplingParams(max_new_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)
DEADLINE_S = 20 * PATIENCE_S  # a request's own, where its lease is to free its blocks first


def busy(cluster: LocalCluster, name: str) -> dict[str, int]:
    """What of an instance's pool is in use, and its jobs; all zero at rest."""
    report = cluster.stats(name)
    figures = {what: report.pool["hbm"][what] for what in ("active", "leased", "limbo")}
    return {**figures, "jobs": report.jobs}


def of_role(cluster: LocalCluster, role: Role) -> Member:
    """The one instance of that role."""
    (member,) = (member for member in cluster.members if member.config.role is role)
    return member


def at_rest(cluster: LocalCluster, *names: str) -> None:
    for name in names or tuple(member.name for member in cluster.members):
        until(lambda name=name: not any(busy(cluster, name).values()), f"{name} at rest")  # type: ignore[misc]


@pytest.fixture(scope="module")
def cluster(clusters: Callable[..., LocalCluster]) -> LocalCluster:
    return clusters("llama")


@pytest.mark.parametrize("flow", ["pd-basic", "pd-caching-3", "colocated"])
@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        ([], SHORT, "empty"),
        (prompt_of(1025), SHORT, "1024"),
        ([3, 4, 500], SHORT, "500"),
    ],
    ids=["empty", "over the model's positions", "no token of the model"],
)
def test_a_request_that_can_never_run_is_refused_with_the_limit(
    cluster: LocalCluster, flow: str, prompt: list[int], sampling: SamplingParams, says: str
) -> None:
    with pytest.raises(RequestRefused, match=says):
        cluster.generate(prompt, sampling, flow).result()
    assert len(cluster.generate(prompt_of(9), SHORT, flow).result().answer) == 4
    at_rest(cluster)


def test_what_is_no_token_list_is_refused_before_it_is_sent(cluster: LocalCluster) -> None:
    with pytest.raises(ValueError, match="got -1"):
        cluster.generate([-1], SHORT)
    with pytest.raises(TypeError, match="integers"):
        cluster.generate([1.5], SHORT)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="'pd-9' is not one of pd-basic, pd-caching-1"):
        cluster.generate([1], SHORT, "pd-9")


def test_a_deadline_ends_the_request_and_frees_its_blocks(cluster: LocalCluster) -> None:
    for flow in ("pd-caching-3", "colocated"):
        with pytest.raises(DeadlineExceeded, match="did not finish"):
            cluster.generate(prompt_of(20), LONG, flow, timeout_s=0.05).result()
    at_rest(cluster)


@pytest.mark.parametrize("flow", ["pd-caching-3", "colocated"])
def test_cancelling_ends_the_answer_and_frees_its_blocks(cluster: LocalCluster, flow: str) -> None:
    generation = cluster.generate(prompt_of(20), LONG, flow)
    seen = 0
    for event in generation:
        if isinstance(event, Token):
            seen += 1
        if seen == 3:
            generation.cancel()
    record = generation.record
    assert record is not None
    assert record.finish_reason == "cancelled"
    assert 3 <= len(record.answer) < 400
    at_rest(cluster)


@pytest.mark.parametrize("flow", ["pd-basic", "colocated"])
def test_leaving_the_iteration_cancels(cluster: LocalCluster, flow: str) -> None:
    events = iter(cluster.generate(prompt_of(20), LONG, flow))
    assert isinstance(next(events), Token)
    del events
    at_rest(cluster)


def test_cancelling_many_at_every_stage_leaves_nothing(cluster: LocalCluster) -> None:
    """Queued for prefill, prefilling, crossing, decoding: some of each, in one burst."""
    generations = [cluster.generate(prompt_of(200 + n), LONG, "pd-caching-3") for n in range(12)]
    outcomes: list[str] = []

    def consume(generation: Generation) -> None:
        outcomes.append(generation.result().finish_reason)

    threads = [threading.Thread(target=consume, args=(generation,)) for generation in generations]
    for thread in threads:
        thread.start()
    until(lambda: sum(busy(cluster, member.name)["jobs"] for member in cluster.members) > 0, "some run")
    for generation in generations:
        generation.cancel()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert set(outcomes) <= {"cancelled", "length"}
    assert outcomes.count("cancelled") >= 6
    at_rest(cluster)


def test_a_prompt_longer_than_the_pool_is_refused_and_a_full_pool_makes_requests_wait(
    settings: Callable[..., ClusterConfig], model_folder: Callable[[str], Path]
) -> None:
    """A pool of 20 blocks: 500 tokens can never be; four requests of 10 blocks each are all answered."""
    with LocalCluster(settings("llama", Role.COLOCATED, hbm=20 * 16384)) as cluster:
        blocks = cluster.welcome().pool_blocks
        too_long = prompt_of(16 * (blocks + 1))
        with pytest.raises((RequestRefused, OutOfBlocks), match=str(blocks)):
            cluster.generate(too_long, SHORT, "colocated").result()
        prompts = [prompt_of(8 * blocks, seed=n) for n in range(4)]
        results: dict[int, list[int]] = {}

        def ask(number: int) -> None:
            results[number] = list(cluster.generate(prompts[number], SHORT, "colocated").result().answer)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert [results[n] for n in range(4)] == [greedy(model_folder("llama"), tuple(p), 4) for p in prompts]
        at_rest(cluster)


# --- death --------------------------------------------------------------------------------------------------


@pytest.fixture
def left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Callable[[str], Path]
) -> Callable[[], list[str]]:
    """What lies in /dev/shm since now, and in the folder that these processes take for /tmp."""
    greedy(model_folder("llama"), (5,), 1)  # torch in this process makes a cache folder of its own, once
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = set(os.listdir("/dev/shm"))
    return lambda: sorted({*os.listdir("/dev/shm")} - before) + sorted(os.listdir(folder))


def held(pid: int) -> tuple[int, int]:
    """Open descriptors and threads of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


class Stuck(threading.Thread):
    """A request in the middle of its hand-over: offered and its blocks lent at P, while D stands still."""

    def __init__(self, cluster: LocalCluster, seed: int) -> None:
        super().__init__()
        self.failure: PoolweaveError | None = None
        self._cluster = cluster
        self._prompt = prompt_of(500, seed=seed)
        self.prefill, self.decode = (of_role(cluster, role) for role in (Role.PREFILL, Role.DECODE))
        os.kill(self.decode.child.pid, signal.SIGSTOP)
        self.start()
        until(lambda: busy(cluster, self.prefill.name)["leased"] > 0, "the prompt's blocks are lent")

    def run(self) -> None:
        try:
            self._cluster.generate(self._prompt, SHORT, "pd-caching-3", timeout_s=DEADLINE_S).result()
        except PoolweaveError as error:
            self.failure = error


def often(transport: str) -> Any:
    return pytest.param(transport, 5, marks=pytest.mark.slow)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("transport", "rounds"), [("shm", 1), often("shm"), often("tcp")])
def test_sigkill_in_the_middle_of_a_transfer(
    settings: Callable[..., ClusterConfig],
    model_folder: Callable[[str], Path],
    left_behind: Callable[[], list[str]],
    transport: str,
    rounds: int,
) -> None:
    """A round kills D, another P: the other lives and is at rest within the lease, the next request after the restart
    is right, and nothing is left anywhere."""
    prompt = prompt_of(50)
    expected = greedy(model_folder("llama"), tuple(prompt), 4)
    own = held(os.getpid())
    with LocalCluster(settings("llama", Role.PREFILL, Role.DECODE, transport=transport)) as cluster:
        names = [member.name for member in cluster.members]

        def ask() -> dict[str, tuple[int, int]]:
            assert list(cluster.generate(prompt, SHORT, "pd-caching-3").result().answer) == expected
            at_rest(cluster)
            return {member.name: held(member.child.pid) for member in cluster.members}

        start, start_own = ask(), held(os.getpid())
        for number, victim in enumerate(names[1:] * rounds + names[:1] * rounds):
            (survivor,) = set(names) - {victim}
            stuck = Stuck(cluster, seed=number + 100)
            cluster.member(victim).child.kill()
            os.kill(stuck.decode.child.pid, signal.SIGCONT) if victim == stuck.prefill.name else None
            stuck.join(PATIENCE_S)
            assert isinstance(stuck.failure, TransferFailed), stuck.failure
            at_rest(cluster, survivor)  # its blocks come back with the lease, long before the request's deadline
            epoch = cluster.member(victim).client.epoch
            assert cluster.restart(victim).client.epoch != epoch
            assert ask() == start, f"descriptors and threads after kill {number + 1}, of {victim}"
            assert held(os.getpid()) == start_own
            assert left_behind() == []
    assert left_behind() == []
    assert held(os.getpid()) == own


def test_a_request_to_a_dead_instance_is_peer_lost_and_restart_cures_it(pair: LocalCluster) -> None:
    prefill, decode = of_role(pair, Role.PREFILL), of_role(pair, Role.DECODE)
    decode.child.kill()
    until(lambda: decode.client.lost, "the death is noticed")
    with pytest.raises(PeerLost, match=decode.name) as caught:
        pair.generate(prompt_of(30), SHORT, "pd-caching-2").result()
    assert "start it again" in str(caught.value)
    at_rest(pair, prefill.name)
    pair.restart(decode.name)
    assert len(pair.generate(prompt_of(30), SHORT, "pd-caching-2").result().answer) == 4


def test_a_prefill_instance_that_dies_while_its_request_decodes_does_not_hurt_the_answer(
    pair: LocalCluster, model_folder: Callable[[str], Path]
) -> None:
    """Only the way back fails, and the record says so."""
    prompt = prompt_of(30, seed=3)
    generation = pair.generate(prompt, SamplingParams(max_new_tokens=40, ignore_eos=True), "pd-caching-3")
    for event in generation:
        if isinstance(event, HandedOver):
            of_role(pair, Role.PREFILL).child.kill()
    assert generation.record is not None
    assert list(generation.record.answer) == greedy(model_folder("llama"), tuple(prompt), 40)
    assert isinstance(generation.record.return_error, TransferFailed)
    at_rest(pair, of_role(pair, Role.DECODE).name)


@pytest.fixture(scope="module")
def pair(settings: Callable[..., ClusterConfig]) -> Iterator[LocalCluster]:
    with LocalCluster(settings("llama", Role.PREFILL, Role.DECODE)) as cluster:
        yield cluster
