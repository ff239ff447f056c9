"""What a sequence's owner hears between layers, and that its errors end nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poolweave.errors import TransferFailed
from poolweave.serving.engine import EngineConfig, SamplingParams, Sequence, TorchEngine
from poolweave.types import Tier

pytestmark = pytest.mark.engine

PROMPT = tuple(range(3, 43))


class Listener:
    """Notes every call, and whether the KV it is told of is in the pool; fails at `fails_at`."""

    def __init__(self, pool: Any, fails_at: int = 99) -> None:
        self.pool = pool
        self.fails_at = fails_at
        self.sequence: Any = None
        self.calls: list[tuple[str, int, int]] = []

    def written(self, layer: int, num_tokens: int) -> None:
        rows = self.pool.slots(self.sequence.blocks)
        kv = self.pool.view(Tier.HBM)[rows, layer].swapaxes(0, 1)  # [part, block, token, heads, dim]
        assert np.isfinite(kv.reshape(kv.shape[0], -1, *kv.shape[3:])[:, :num_tokens]).all()
        self.calls.append(("written", layer, num_tokens))

    def needed(self, layer: int) -> None:
        self.calls.append(("needed", layer, 0))
        if layer == self.fails_at:
            raise TransferFailed("the KV did not come", reason="test")


def listened(pool: Any, name: str, **settings: Any) -> tuple[Sequence, Listener]:
    listener = Listener(pool, **settings)
    listener.sequence = Sequence(name, list(PROMPT), SamplingParams(max_new_tokens=4), hook=listener)
    return listener.sequence, listener


@pytest.mark.parametrize("kind", ["llama", "deepseek"])
def test_every_layer_of_every_chunk_is_told_in_order(
    loaded: Any, make_pool: Any, run: Any, greedy: Any, kind: str
) -> None:
    model = loaded(kind)
    pool = make_pool(model)
    sequence, listener = listened(pool, "r")
    assert run(TorchEngine(model, pool, EngineConfig(step_tokens=24, max_sequences=4)), sequence) == [
        greedy(kind, PROMPT, 4)
    ]
    expected = [
        call
        for end in (24, 40, 41, 42, 43)
        for layer in range(model.layout.num_layers)
        for call in (("written", layer, end), ("needed", layer, 0))
    ]
    assert listener.calls == expected


def test_an_error_of_a_hook_ends_its_request_alone(loaded: Any, make_pool: Any, run: Any, greedy: Any) -> None:
    model = loaded("llama")
    pool = make_pool(model)
    (bad, listener), (good, _) = listened(pool, "bad", fails_at=1), listened(pool, "good")
    engine = TorchEngine(model, pool)
    assert run(engine, bad, good) == [[], greedy("llama", PROMPT, 4)]
    assert (bad.finish_reason, bad.num_computed) == ("error", 0)
    assert isinstance(bad.error, TransferFailed)
    assert listener.calls[-1] == ("needed", 1, 0)
    assert engine.stats().computed_tokens == len(PROMPT) + 3
    assert not engine.has_work


class Leaver(Listener):
    """Its request is cancelled while its first layer is computed."""

    engine: TorchEngine

    def needed(self, layer: int) -> None:
        super().needed(layer)
        self.engine.cancel("gone")


def test_a_step_that_nobody_wants_any_more_is_broken_off_and_no_other(
    loaded: Any, make_pool: Any, run: Any, greedy: Any
) -> None:
    model = loaded("llama")
    pool = make_pool(model)
    for others in ((), ("good",)):
        engine, leaver = TorchEngine(model, pool), Leaver(pool)
        leaver.engine = engine
        gone = leaver.sequence = Sequence("gone", list(PROMPT), SamplingParams(max_new_tokens=4), hook=leaver)
        wanted = [listened(pool, name)[0] for name in others]
        answers = run(engine, gone, *wanted)
        assert gone.finish_reason == "cancelled"
        assert answers[1:] == [greedy("llama", PROMPT, 4) for _ in others]
        layers = {layer for _, layer, _ in leaver.calls}
        assert layers == ({*range(model.layout.num_layers)} if others else {0})
        assert gone.num_computed == (len(PROMPT) if others else 0)
        assert not engine.has_work
