"""PD caching and CrossPool together: one prefill process switches among three models, one CrossPool process decodes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from ref_transformers import greedy, prompt_of, save_random_model, save_tokenizer
from ref_waiting import until

from poolweave.errors import ConfigError, RequestRefused, WorkerLost
from poolweave.serving.cluster import LocalCluster
from poolweave.serving.crosspool.config import CrossPoolConfig
from poolweave.serving.engine.sequence import SamplingParams
from poolweave.serving.generation import RequestRecord
from poolweave.serving.instance.config import ClusterConfig, InstanceConfig
from poolweave.serving.instance.named_model import NamedModel
from poolweave.types import Role

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(900)]
NAMES = ("mixtral", "qwen3moe", "deepseek")
BLOCK = 16


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[NamedModel, ...]:
    root = tmp_path_factory.mktemp("cold")
    made = [NamedModel(name=name, path=str(save_random_model(name, root / name))) for name in NAMES]
    save_tokenizer(root / "mixtral")  # for stop strings
    return tuple(made)


@pytest.fixture(scope="module")
def cluster(models: tuple[NamedModel, ...]) -> Iterator[LocalCluster]:
    crosspool = CrossPoolConfig(kv_budget="8MiB", max_tokens=512, max_batch=2)
    prefill = InstanceConfig(name=f"p-{os.getpid()}", role=Role.PREFILL, models=models, hbm="4MiB")
    decode = InstanceConfig(
        name=f"d-{os.getpid()}", role=Role.DECODE, kind="crosspool", models=models, hbm="4MiB", crosspool=crosspool
    )
    with LocalCluster(ClusterConfig(instances=(prefill, decode))) as made:
        yield made


def ask(cluster: LocalCluster, model: str, prompt: list[int], tenant: bytes = b"", **sampling: object) -> RequestRecord:
    params = SamplingParams(**{"max_new_tokens": 12, **sampling})  # type: ignore[arg-type]
    return cluster.generate(prompt, params, model=model, tenant=tenant, timeout_s=300).result()


def path_of(models: tuple[NamedModel, ...], name: str) -> Path:
    return next(Path(one.path) for one in models if one.name == name)


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_transformers_and_the_second_turn_hits_at_both(
    cluster: LocalCluster, models: tuple[NamedModel, ...], name: str
) -> None:
    path, prompt = path_of(models, name), prompt_of(37, seed=3)
    cached = there = back = 0
    for turn in range(3):
        record = ask(cluster, name, prompt)
        assert list(record.answer) == greedy(path, tuple(prompt), 12), turn
        assert record.cached_tokens == cached
        assert record.to_decode.pulled_blocks == -(-len(prompt) // BLOCK) - there
        computed = (len(prompt) + 11) // BLOCK
        assert record.to_prefill.pulled_blocks == computed - len(prompt) // BLOCK
        assert record.return_error is None
        cached, there, back = computed * BLOCK, computed, back + record.to_prefill.nbytes
        prompt = [*prompt, *record.answer, *prompt_of(9, seed=turn)]
    assert back > 0


def test_requests_of_all_models_at_once_are_right_and_the_prefill_process_switches(
    cluster: LocalCluster, models: tuple[NamedModel, ...]
) -> None:
    asked = [(name, prompt_of(20 + 7 * n, seed=n)) for n in range(3) for name in NAMES]
    got: dict[int, RequestRecord] = {}
    threads = [
        threading.Thread(target=lambda n=n, name=name, prompt=prompt: got.update({n: ask(cluster, name, prompt)}))
        for n, (name, prompt) in enumerate(asked)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, (name, prompt) in enumerate(asked):
        assert list(got[n].answer) == greedy(path_of(models, name), tuple(prompt), 12)
    prefill, decode = cluster.members[0], cluster.members[-1]
    assert cluster.stats(prefill.name).engine["switches"] >= 2
    figures = cluster.stats(decode.name).engine
    assert figures["running"] == figures["waiting"] == 0
    assert all(blocks == 0 for rank in figures["kv"] for blocks in rank["used_blocks"].values())
    assert sum(figures["kv"][0]["mapped_pages"].values()) <= len(NAMES), "at most one idle page a model"


def test_another_tenant_and_another_model_find_nothing(cluster: LocalCluster) -> None:
    prompt = prompt_of(40, seed=77)
    ask(cluster, "qwen3moe", prompt)
    assert ask(cluster, "qwen3moe", prompt).cached_tokens == 32
    other = ask(cluster, "qwen3moe", prompt, tenant=b"other")
    assert (other.cached_tokens, other.matched_blocks) == (0, 0)
    assert ask(cluster, "deepseek", prompt).cached_tokens == 0


def workers(cluster: LocalCluster) -> list[psutil.Process]:
    """Of the decode instance; an FFN worker is the last."""
    return psutil.Process(cluster.members[-1].child.pid).children()


def decoding(cluster: LocalCluster) -> int:
    """Requests that the decode instance's engine runs now."""
    return int(cluster.stats(cluster.members[-1].name).engine.get("running", 0))


@contextmanager
def stalled(worker: psutil.Process, cluster: LocalCluster) -> Iterator[None]:
    """The worker stands still meanwhile; nothing was running before."""
    until(lambda: decoding(cluster) == 0, "earlier requests have ended")
    worker.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            worker.resume()


def test_stops_by_tokens_by_text_and_by_a_cancel(cluster: LocalCluster, models: tuple[NamedModel, ...]) -> None:
    prompt = prompt_of(21, seed=5)
    whole = greedy(path_of(models, "mixtral"), tuple(prompt), 12)
    stop = next(n for n in range(2, 12) if whole[n] not in whole[:n])
    record = ask(cluster, "mixtral", prompt, stop_token_ids=(whole[stop],))
    assert (list(record.answer), record.finish_reason) == (whole[: stop + 1], "stop")
    with pytest.raises(RequestRefused, match="stop strings need a tokenizer"):
        ask(cluster, "deepseek", prompt, stop=("x",))
    worker = workers(cluster)[-1]
    with ThreadPoolExecutor(1) as client, stalled(worker, cluster):  # or the answer may be whole before the cancel
        generation = cluster.generate(prompt, SamplingParams(max_new_tokens=400), model="qwen3moe", timeout_s=300)
        answer = client.submit(generation.result)
        until(lambda: decoding(cluster) == 1, "the request is decoded")
        generation.cancel()
        threading.Event().wait(0.5)
        worker.resume()
        assert answer.result(120).finish_reason == "cancelled"


def test_what_cannot_be_is_refused_by_name(cluster: LocalCluster) -> None:
    with pytest.raises(ConfigError, match="no model 'gone' is here: deepseek, mixtral, qwen3moe"):
        cluster.generate([1, 2], model="gone")
    with pytest.raises(RequestRefused, match="takes 512 here"):
        ask(cluster, "mixtral", prompt_of(30), max_new_tokens=800)


def test_a_worker_that_is_killed_fails_its_requests_and_comes_back(
    cluster: LocalCluster, models: tuple[NamedModel, ...]
) -> None:
    decode, prompt = cluster.members[-1], prompt_of(25, seed=8)
    assert len(workers(cluster)) == 2
    worker = workers(cluster)[-1]
    with ThreadPoolExecutor(1) as client, stalled(worker, cluster):  # or the answer may be whole before the kill
        generation = cluster.generate(prompt, SamplingParams(max_new_tokens=450), model="mixtral", timeout_s=300)
        answer = client.submit(generation.result)
        until(lambda: decoding(cluster) == 1, "the request is decoded")
        worker.kill()
        with pytest.raises(WorkerLost):
            answer.result(120)
    for name in NAMES:
        assert list(ask(cluster, name, prompt).answer) == greedy(path_of(models, name), tuple(prompt), 12)
    assert cluster.stats(decode.name).engine["restarts"] == 1
