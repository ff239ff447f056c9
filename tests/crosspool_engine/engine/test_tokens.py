"""Six architectures on one engine: greedy tokens as transformers', whoever moves the batches and however they mix."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
from ref_decode import ARCHITECTURES, LAYERS, NEW, decode, drive, greedy, halted, mixed, tokens_of

from poolweave.crosspool_engine import DecodeEngine, DecodeRequest, FfnPlacement, ModelShape, Serving
from poolweave.errors import RequestRefused

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(600)]


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("lowered", [True, False], ids=["lowered", "hosted"])
def test_all_cells_decode_the_tokens_of_transformers(
    engine: DecodeEngine, expected: dict[str, list[int]], lowered: bool, in_flight: int
) -> None:
    engine.set_control(lowered=lowered, in_flight=in_flight)
    got = decode(engine, mixed())
    assert tokens_of(got) == expected
    assert {generation.finish_reason for generation in got.values()} == {"length"}
    assert all((np.diff(generation.stamps_ns) > 0).all() for generation in got.values())


def test_stages_are_told_with_their_times(engine: DecodeEngine) -> None:
    start = time.monotonic_ns()
    decode(engine, [DecodeRequest(request_id="r", model="llama", tokens=[4], max_new_tokens=5)])
    stages = [stage for stage in engine.stages() if stage.start_ns >= start]
    assert sum(stage.worker.startswith("ffn") for stage in stages) == 5 * LAYERS
    assert sum(stage.worker.startswith("attention") for stage in stages) == 5 * (LAYERS + 1)
    assert {(stage.model, stage.rows) for stage in stages} == {("llama", 1)}
    for before, after in itertools.pairwise(stages):  # one batch: a stage begins when the one before has ended
        assert before.start_ns < before.end_ns <= after.start_ns


def test_requests_alone_decode_the_same_tokens_as_in_any_mix(
    engine: DecodeEngine, expected: dict[str, list[int]]
) -> None:
    for request in mixed():
        assert tokens_of(decode(engine, [request])) == {request.request_id: expected[request.request_id]}


@pytest.mark.parametrize("owners", [[0, 0, 0], [1, 0, 1]])
def test_any_spread_of_layers_over_ranks_decodes_the_same_tokens(
    engine: DecodeEngine, saved: dict[str, tuple[Any, str]], expected: dict[str, list[int]], owners: list[int]
) -> None:
    assert len(owners) == LAYERS
    for name in ARCHITECTURES:
        engine.deactivate(name)
        engine.activate(name, Serving(path=saved[name][1], placement=FfnPlacement.by_layer(owners)))
    assert tokens_of(decode(engine, mixed())) == expected


@pytest.mark.parametrize("lowered", [True, False], ids=["lowered", "hosted"])
def test_experts_split_over_ranks_decode_the_same_tokens(
    engine: DecodeEngine, saved: dict[str, tuple[Any, str]], expected: dict[str, list[int]], lowered: bool
) -> None:
    """A batch goes from rank to rank in each mixture layer; what is not routed lies on rank 0."""
    engine.set_control(lowered=lowered, in_flight=2)
    for name in ARCHITECTURES:
        engine.deactivate(name)
        placement = FfnPlacement.by_expert(ModelShape.from_directory(saved[name][1]), 2)
        engine.activate(name, Serving(path=saved[name][1], placement=placement))
    assert tokens_of(decode(engine, mixed())) == expected


@pytest.mark.parametrize("name", ["qwen3-moe", "glm"])
def test_kv_from_a_prefill_goes_on_here_and_comes_back(
    engine: DecodeEngine, saved: dict[str, tuple[Any, str]], name: str
) -> None:
    """PD disaggregation by hand: transformers' cache in, decoded tokens and KV out, continued by transformers."""
    import torch
    from transformers import DynamicCache

    model = saved[name][0]
    prompt = [int(t) for t in np.random.default_rng(8).integers(0, 199, 15)]
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([prompt]), cache=cache)
    layout = [
        torch.stack((c.keys, c.values)) if name == "qwen3-moe" else torch.cat((c.keys, c.values), -1)
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
    with halted(*engine.worker_pids()[2:]):
        engine.step(0.0)
        assert engine.cancel("cancelled")
        assert not engine.cancel("nobody")
        engine.step(0.0)
    drive(engine)
    stopped, warm, again, cancelled = (engine.result(name) for name in ("stop", "warm", "again", "cancelled"))
    assert stopped.finish_reason == "stop"
    assert stopped.tokens.tolist() == expected["r0"][: expected["r0"].index(stop) + 1]
    assert warm.tokens.tolist() == again.tokens.tolist() != expected["r0"]
    assert cancelled.finish_reason == "cancelled"
    assert len(cancelled.tokens) < 100


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
