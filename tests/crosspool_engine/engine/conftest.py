"""One engine with real processes for all tests of this folder: two attention ranks, two FFN ranks, six models."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the engine extra")

from ref_decode import ARCHITECTURES, BUDGET, PAGE, Clock, greedy, mixed

from poolweave.crosspool_engine import DecodeEngine, EngineConfig, Serving
from poolweave.errors import InstanceClosed

Saved = dict[str, tuple[Any, str]]


@pytest.fixture(scope="package")
def saved(tiny: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """(model, directory) by name."""
    root = tmp_path_factory.mktemp("models")
    models = {name: tiny(name) for name in ARCHITECTURES}
    for name, model in models.items():
        model.save_pretrained(root / name)
    return {name: (model, str(root / name)) for name, model in models.items()}


@pytest.fixture(scope="package")
def expected(saved: Saved) -> dict[str, list[int]]:
    """transformers' answers to `mixed()`."""
    return {r.request_id: greedy(saved[r.model][0], np.asarray(r.tokens).tolist()) for r in mixed()}


@pytest.fixture(scope="package")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="package")
def crew(saved: Saved, clock: Clock) -> Iterator[DecodeEngine]:
    """Room for a few requests at a time."""
    config = EngineConfig(
        kv_budget=BUDGET // 2, page_bytes=PAGE, attention_ranks=2, ffn_ranks=2, max_models=6, max_tokens=128,
        max_hidden=128, block_tokens=4, max_batch=3, in_flight=3, max_waiting=24, events=1024,
    )  # fmt: skip
    engine = DecodeEngine(config, clock=clock)
    with engine:
        for name, (_, path) in saved.items():
            engine.activate(name, Serving(path=path))
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
    crew.drop_history()
    crew.check()
    assert all(blocks == 0 for rank in crew.stats().kv for blocks in rank.used_blocks.values())
