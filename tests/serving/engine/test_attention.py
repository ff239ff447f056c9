"""Greedy tokens of the engine against `transformers` without any cache, for each kind of attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poolweave.serving.engine import EngineConfig, SamplingParams, Sequence, TorchEngine
from poolweave.types import Tier

pytestmark = pytest.mark.engine

MODELS = ["llama", "mha", "qwen3moe", "mixtral", "deepseek", "deepseek_qlora", "glm4lite"]
LENGTHS = [1, 15, 16, 17, 500]
NEW = 6


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng((length, seed)).integers(2, 500, length).tolist())


def sequence(tokens: tuple[int, ...], name: str = "r", **settings: Any) -> Sequence:
    return Sequence(name, list(tokens), SamplingParams(max_new_tokens=NEW), **settings)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", LENGTHS)
def test_alone(name: str, length: int, loaded: Any, make_pool: Any, greedy: Any, run: Any) -> None:
    model = loaded(name)
    engine = TorchEngine(model, make_pool(model))
    assert run(engine, sequence(prompt(length))) == [greedy(name, prompt(length), NEW)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("step_tokens", [5, 33, 1024])
def test_ragged_batch_with_chunked_prefill(
    name: str, step_tokens: int, loaded: Any, make_pool: Any, greedy: Any, run: Any
) -> None:
    model = loaded(name)
    engine = TorchEngine(model, make_pool(model), EngineConfig(step_tokens=step_tokens, max_sequences=5))
    lengths = [500, 1, 17, 15, 16]
    answers = run(engine, *(sequence(prompt(length), str(length)) for length in lengths))
    assert answers == [greedy(name, prompt(length), NEW) for length in lengths]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cached", [1, 30, 31])
def test_on_a_cached_prefix(name: str, cached: int, loaded: Any, make_pool: Any, greedy: Any, run: Any) -> None:
    model = loaded(name)
    pool = make_pool(model)
    engine = TorchEngine(model, pool, EngineConfig(step_tokens=128))
    first = sequence(prompt(500))
    run(engine, first)
    prefix = first.blocks[:cached]
    again = sequence(prompt(500), blocks=prefix, num_computed=cached * 16)
    pool.retain(prefix)
    assert run(engine, again) == [greedy(name, prompt(500), NEW)]


@pytest.mark.parametrize("name", MODELS)
def test_every_cached_block_is_read(name: str, loaded: Any, make_pool: Any, run: Any, logits: Any) -> None:
    """The negative control of the test above: with a cached block zeroed, what follows differs."""
    model = loaded(name)
    pool = make_pool(model)
    engine = TorchEngine(model, pool)
    first = sequence(prompt(70))
    run(engine, first)
    kv, prefix = pool.view(Tier.HBM), first.blocks[:4]

    def again() -> Any:
        logits.clear()
        pool.retain(prefix)
        run(engine, sequence(prompt(70), blocks=prefix, num_computed=64))
        return logits[0]

    cold = again()
    for slot in pool.slots(prefix):
        kept = kv[slot].copy()
        kv[slot] = 0
        assert (again() - cold).abs().max() > 1e-3
        kv[slot] = kept
        assert (again() - cold).abs().max() == 0


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_load_failing_at_any_block_is_recomputed(name: str, loaded: Any, make_pool: Any, greedy: Any, run: Any) -> None:
    model = loaded(name)
    pool = make_pool(model)
    engine = TorchEngine(model, pool)
    first = sequence(prompt(100))
    run(engine, first)
    for lost in range(6):  # blocks from `lost` on are dropped
        kept = first.blocks[:lost]
        pool.retain(kept)
        assert run(engine, sequence(prompt(100), blocks=kept, num_computed=lost * 16)) == [
            greedy(name, prompt(100), NEW)
        ]
