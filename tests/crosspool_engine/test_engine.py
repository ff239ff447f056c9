"""The whole engine with real processes: three models of three architectures, against transformers' greedy tokens."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the engine extra")

import torch

from poolweave.crosspool_engine import DecodeEngine, DecodeRequest, EngineConfig, Generation
from poolweave.errors import ConfigError, InstanceClosed, ModelNotFound, Overloaded, RequestRefused, WorkerLost

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.slow]
THREE = ("qwen3-moe", "deepseek-v2", "glm")
NEW = 12
PAGE = 64 << 10


@pytest.fixture(scope="module")
def saved(tiny: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, str]]:
    """(model, directory) by name."""
    root = tmp_path_factory.mktemp("models")
    models = {name: tiny(name) for name in THREE}
    for name, model in models.items():
        model.save_pretrained(root / name)
    return {name: (model, str(root / name)) for name, model in models.items()}


class Clock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(scope="module")
def crew(saved: dict[str, tuple[Any, str]]) -> Iterator[DecodeEngine]:
    """One engine of an attention worker and two FFN ranks for all tests; room for a few requests at a time."""
    config = EngineConfig(
        kv_budget=8 * PAGE, page_bytes=PAGE, max_models=3, max_tokens=128, max_hidden=128, block_tokens=4, max_batch=3,
        in_flight=3, ffn_ranks=2, max_waiting=27,
    )  # fmt: skip
    engine = DecodeEngine(config, clock=CLOCK)
    pids = engine.worker_pids()
    with engine:
        for name in THREE:
            engine.activate(name, saved[name][1])
        yield engine
        pids = engine.worker_pids()
    engine.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(InstanceClosed):
        engine.step()


@pytest.fixture
def engine(crew: DecodeEngine) -> Iterator[DecodeEngine]:
    """Each test finds it idle, with lowering and a pipeline of two, and leaves it so."""
    crew.set_control(lowered=True, in_flight=2)
    yield crew
    assert not crew.has_work
    crew.check()
    assert sum(crew.stats().kv.used_blocks.values()) == 0


def prompts(n: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [[int(t) for t in rng.integers(0, 199, rng.integers(1, 9))] for _ in range(n)]


def greedy(model: Any, prompt: list[int], new: int = NEW) -> list[int]:
    """transformers' greedy continuation."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(new):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def drive(engine: DecodeEngine, *, steps: int = 100_000) -> dict[str, list[int]]:
    """Step until nothing is left. -> tokens as they were told, by request"""
    told: dict[str, list[int]] = {}
    while engine.has_work:
        steps -= 1
        assert steps > 0, "the engine does not come to an end"
        for news in engine.step():
            told.setdefault(news.request_id, [])
            if news.token is not None:
                told[news.request_id].append(news.token)
    return told


def decode(engine: DecodeEngine, requests: list[DecodeRequest]) -> dict[str, Generation]:
    for request in requests:
        engine.add(request)
    told = drive(engine)
    results = {request.request_id: engine.result(request.request_id) for request in requests}
    assert {name: got.tokens.tolist() for name, got in results.items()} == told
    return results


def mixed(count: int = 9) -> list[DecodeRequest]:
    return [
        DecodeRequest(request_id=f"r{n}", model=THREE[n % 3], tokens=prompt, max_new_tokens=NEW)
        for n, prompt in enumerate(prompts(count))
    ]


@pytest.fixture(scope="module")
def expected(saved: dict[str, tuple[Any, str]]) -> dict[str, list[int]]:
    return {r.request_id: greedy(saved[r.model][0], np.asarray(r.tokens).tolist()) for r in mixed()}


def test_greedy_tokens_equal_transformers(engine: DecodeEngine, expected: dict[str, list[int]]) -> None:
    got = decode(engine, mixed())
    assert {name: generation.tokens.tolist() for name, generation in got.items()} == expected
    assert {generation.finish_reason for generation in got.values()} == {"length"}
    assert all((np.diff(generation.stamps_ns) > 0).all() for generation in got.values())
    engine.check()
    assert sum(engine.stats().kv.used_pages.values()) == 0


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("lowered", [True, False], ids=["lowered", "hosted"])
def test_all_cells_decode_the_same_tokens(
    engine: DecodeEngine, expected: dict[str, list[int]], lowered: bool, in_flight: int
) -> None:
    engine.set_control(lowered=lowered, in_flight=in_flight)
    got = decode(engine, mixed())
    assert {name: generation.tokens.tolist() for name, generation in got.items()} == expected


def test_any_spread_of_layers_over_ranks_decodes_the_same_tokens(
    engine: DecodeEngine, saved: dict[str, tuple[Any, str]], expected: dict[str, list[int]]
) -> None:
    for owners in ([0, 0, 0], [1, 0, 1]):
        for name in THREE:
            engine.deactivate(name)
            engine.activate(name, saved[name][1], owners=owners)
        got = decode(engine, mixed())
        assert {name: generation.tokens.tolist() for name, generation in got.items()} == expected


@pytest.mark.parametrize("name", THREE)
def test_kv_from_a_prefill_goes_on_here_and_comes_back(
    engine: DecodeEngine, saved: dict[str, tuple[Any, str]], name: str
) -> None:
    """PD disaggregation by hand: transformers' cache in, decoded tokens and KV out, continued by transformers."""
    from transformers import DynamicCache

    model = saved[name][0]
    prompt = [int(t) for t in np.random.default_rng(8).integers(0, 199, 15)]
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([prompt]), cache=cache)
    layout = [
        torch.cat((c.keys, c.values), -1) if name != "qwen3-moe" else torch.stack((c.keys, c.values))
        for c in cache.layers
    ]
    planes = torch.stack([x.reshape(-1, *x.shape[-3:]) for x in layout])  # [layers, parts, heads, tokens, dim]
    tokens_first = planes.permute(3, 0, 1, 2, 4)  # [tokens, layers, parts, heads, dim]
    computed = 14
    padded = torch.zeros(16, *tokens_first.shape[1:])
    padded[:computed] = tokens_first[:computed]
    kv = padded.reshape(4, 4, *padded.shape[1:]).permute(0, 2, 3, 1, 4, 5).contiguous().numpy()
    request = DecodeRequest(
        request_id="pd", model=name, tokens=prompt, max_new_tokens=NEW, kv=kv, num_computed=computed, return_kv=True
    )
    got = decode(engine, [request])["pd"]
    assert got.tokens.tolist() == greedy(model, prompt)
    assert got.kv is not None
    assert got.kv.shape[0] == 7  # 26 computed tokens
    np.testing.assert_array_equal(got.kv[:3], kv[:3])
    whole = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([prompt + got.tokens.tolist()[:-1]]), cache=whole)
    last = whole.layers[-1].keys[0, :, 25].numpy()  # [heads, dim]
    np.testing.assert_allclose(got.kv[6, -1, 0, 1][..., : last.shape[-1]], last, atol=1e-5)


def test_stop_tokens_sampling_and_cancelling(engine: DecodeEngine, expected: dict[str, list[int]]) -> None:
    first = mixed()[0]
    stop = expected["r0"][4]
    base = {"model": first.model, "tokens": first.tokens}
    engine.add(DecodeRequest(request_id="stop", **base, max_new_tokens=NEW, stop_token_ids=(stop,)))
    engine.add(DecodeRequest(request_id="warm", **base, max_new_tokens=NEW, temperature=2.0, seed=5))
    engine.add(DecodeRequest(request_id="again", **base, max_new_tokens=NEW, temperature=2.0, seed=5))
    engine.add(DecodeRequest(request_id="cancelled", **base, max_new_tokens=100))
    engine.step()
    assert engine.cancel("cancelled")
    assert not engine.cancel("nobody")
    drive(engine)
    stopped, warm, again, cancelled = (engine.result(name) for name in ("stop", "warm", "again", "cancelled"))
    assert stopped.finish_reason == "stop"
    assert stopped.tokens.tolist() == expected["r0"][: expected["r0"].index(stop) + 1]
    assert warm.tokens.tolist() == again.tokens.tolist() != expected["r0"]
    assert cancelled.finish_reason == "cancelled"
    assert len(cancelled.tokens) < 100
    engine.check()


def test_a_burst_over_the_budget_queues_and_never_corrupts(
    engine: DecodeEngine, expected: dict[str, list[int]]
) -> None:
    """Room for a few requests at a time: the others wait their turn; KV never passes the budget."""
    burst = [
        DecodeRequest(request_id=f"{r.request_id}/{n}", model=r.model, tokens=r.tokens, max_new_tokens=100)
        for n in range(3)
        for r in mixed()
    ]
    for request in burst:
        engine.add(request)
    with pytest.raises(Overloaded, match="27 requests wait already"):
        engine.add(DecodeRequest(request_id="late", model=THREE[0], tokens=[1]))
    peak, waited = 0, 0
    while engine.has_work:
        engine.step()
        peak, waited = max(peak, engine.stats().kv_bytes), max(waited, engine.stats().waiting)
    assert 0 < peak <= 8 * PAGE
    assert waited > 0
    for request in burst:
        tokens = engine.result(request.request_id).tokens.tolist()
        assert len(tokens) == 100
        assert tokens[:NEW] == expected[request.request_id.split("/")[0]]
    assert all(mapped <= 1 for mapped in engine.stats().kv.mapped_pages.values())  # demand is gone, within a page


def test_requests_that_wait_too_long_are_ended(engine: DecodeEngine) -> None:
    for n in range(9):
        engine.add(DecodeRequest(request_id=f"big{n}", model="glm", tokens=[1], max_new_tokens=120))
    engine.step(0.0)
    waiting = engine.stats().waiting
    assert waiting > 0
    CLOCK.now += 61.0
    told = [news for news in engine.step(0.0) if news.finish_reason == "error"]
    assert len(told) == waiting
    assert all(isinstance(news.error, Overloaded) for news in told)
    drive(engine)
    assert sum(engine.result(f"big{n}").finish_reason == "length" for n in range(9)) == 9 - waiting


def test_deactivating_gives_everything_back_and_a_second_activation_is_bit_identical(
    engine: DecodeEngine, saved: dict[str, tuple[Any, str]]
) -> None:
    request = DecodeRequest(
        request_id="a", model="glm", tokens=[3, 1, 4], max_new_tokens=30, temperature=0.7, seed=1, return_kv=True
    )
    first = decode(engine, [request])["a"]
    engine.add(DecodeRequest(request_id="held", model="glm", tokens=[5], max_new_tokens=100))
    engine.step()
    with pytest.raises(ConfigError, match="'glm' has 1 requests running"):
        engine.deactivate("glm")
    engine.cancel("held")
    drive(engine)
    engine.result("held")
    engine.deactivate("glm")
    engine.check()
    assert set(engine.stats().models) == {"qwen3-moe", "deepseek-v2"}
    with pytest.raises(ConfigError, match="no model 'glm' is active"):
        engine.add(request)
    engine.activate("glm", saved["glm"][1])
    second = decode(engine, [request])["a"]
    assert first.tokens.tobytes() == second.tokens.tobytes()
    assert first.kv is not None
    assert second.kv is not None
    assert first.kv.tobytes() == second.kv.tobytes()


def test_a_failed_activation_leaves_everything_as_it_was(
    engine: DecodeEngine, saved: dict[str, tuple[Any, str]], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """The attention half loads, the FFN half holds NaN: both are given back, the others decode on."""
    from safetensors.torch import load_file, save_file

    saved["glm"][0].save_pretrained(tmp_path / "broken")
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    weights["model.layers.2.mlp.shared_experts.up_proj.weight"][0] = float("nan")
    save_file(weights, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="'more' is active already, or max_models 3 are"):
        engine.activate("more", saved["glm"][1])
    engine.deactivate("glm")
    before = engine.stats()
    with pytest.raises(ConfigError, match=r"shared_experts\.up_proj\.weight holds NaN"):
        engine.activate("broken", str(tmp_path / "broken"))
    with pytest.raises(ModelNotFound):
        engine.activate("nothing", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="owners"):
        engine.activate("glm", saved["glm"][1], owners=[0, 0])
    assert engine.stats() == before
    engine.check()
    engine.activate("glm", saved["glm"][1])  # in the place that the broken one was to have
    got = decode(engine, mixed())
    assert {name: generation.tokens.tolist() for name, generation in got.items()} == expected


@pytest.mark.parametrize("lowered", [True, False], ids=["lowered", "hosted"])
def test_sigkill_of_an_ffn_rank_ends_its_models_and_the_others_go_on(
    engine: DecodeEngine, saved: dict[str, tuple[Any, str]], expected: dict[str, list[int]], lowered: bool
) -> None:
    engine.set_control(lowered=lowered, in_flight=2)
    for name, rank in zip(THREE, (0, 0, 1), strict=True):
        engine.deactivate(name)
        engine.activate(name, saved[name][1], owners=[rank] * 3)
    for name in THREE:
        engine.add(DecodeRequest(request_id=name, model=name, tokens=[7], max_new_tokens=100))
    while len(engine.step()) == 0:
        pass
    os.kill(engine.worker_pids()[2], signal.SIGKILL)
    drive(engine)
    lost = engine.result("glm")
    assert lost.finish_reason == "error"
    assert isinstance(lost.error, WorkerLost)
    assert lost.error.exit_code == -signal.SIGKILL
    for name in ("qwen3-moe", "deepseek-v2"):
        assert engine.result(name).tokens.tolist() == greedy(saved[name][0], [7], 100)
    assert engine.stats().lost == ("glm",)
    engine.check()  # blocks and pages came back
    with pytest.raises(WorkerLost):
        engine.add(DecodeRequest(request_id="again", model="glm", tokens=[7]))
    engine.restart()
    got = decode(engine, mixed())
    assert {name: generation.tokens.tolist() for name, generation in got.items()} == expected


@pytest.mark.parametrize("lowered", [True, False], ids=["lowered", "hosted"])
def test_sigkill_of_the_attention_worker_is_reported_and_restart_works(
    engine: DecodeEngine, expected: dict[str, list[int]], lowered: bool
) -> None:
    engine.set_control(lowered=lowered, in_flight=2)
    for name in THREE:
        engine.add(DecodeRequest(request_id=name, model=name, tokens=[7], max_new_tokens=120))
    while len(engine.step()) == 0:
        pass
    os.kill(engine.worker_pids()[0], signal.SIGKILL)
    drive(engine)
    assert all(isinstance(engine.result(name).error, WorkerLost) for name in THREE)
    engine.restart()
    engine.check()
    assert engine.stats().kv_bytes == 0
    got = decode(engine, mixed())
    assert {name: generation.tokens.tolist() for name, generation in got.items()} == expected


def test_requests_that_can_never_run_are_refused(engine: DecodeEngine) -> None:
    with pytest.raises(RequestRefused, match="takes 128 here"):
        engine.add(DecodeRequest(request_id="long", model="glm", tokens=[1] * 120, max_new_tokens=9))
    with pytest.raises(RequestRefused, match="outside the vocabulary of 199"):
        engine.add(DecodeRequest(request_id="alien", model="glm", tokens=[199]))
    kv = np.zeros((2, 3, 1, 4, 1, 48), np.float32)
    with pytest.raises(RequestRefused, match="KV of 2 tokens is"):
        engine.add(DecodeRequest(request_id="kv", model="glm", tokens=[1, 2, 3], kv=kv, num_computed=2))
    with pytest.raises(RequestRefused, match="at least one token"):
        DecodeRequest(request_id="empty", model="glm", tokens=[])
    with pytest.raises(RequestRefused, match="num_computed 3 of 3"):
        DecodeRequest(request_id="all", model="glm", tokens=[1, 2, 3], num_computed=3, kv=np.zeros(1))
    assert not engine.has_work
