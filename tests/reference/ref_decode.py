"""A decode engine driven by hand, and what its models should say. For tests of the whole engine."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from poolweave.crosspool_engine import DecodeEngine, DecodeRequest, Generation

ARCHITECTURES = ("qwen3-moe", "deepseek-v2", "glm", "mixtral", "llama", "qwen3")
NEW = 12
VOCAB = 199
LAYERS = 3
PAGE = 64 << 10
BUDGET = 8 * PAGE


class Clock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def greedy(model: Any, prompt: Sequence[int], new: int = NEW) -> list[int]:
    """transformers' greedy continuation, the whole prefix computed anew for each token."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(new):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def mixed(count: int = 12, new: int = NEW) -> list[DecodeRequest]:
    """Requests over all architectures in turn, `r0`, `r1`, ...; prompts of 1 to 8 tokens."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 9)) for _ in range(count)]
    return [
        DecodeRequest(request_id=f"r{n}", model=ARCHITECTURES[n % 6], tokens=prompt.tolist(), max_new_tokens=new)
        for n, prompt in enumerate(prompts)
    ]


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


def decode(engine: DecodeEngine, requests: Sequence[DecodeRequest]) -> dict[str, Generation]:
    """All of them to their ends; what was told is what resulted."""
    for request in requests:
        engine.add(request)
    told = drive(engine)
    results = {request.request_id: engine.result(request.request_id) for request in requests}
    assert {name: got.tokens.tolist() for name, got in results.items()} == told
    return results


def tokens_of(results: dict[str, Generation]) -> dict[str, list[int]]:
    return {name: got.tokens.tolist() for name, got in results.items()}


@contextmanager
def halted(*pids: int) -> Iterator[None]:
    """Processes that do not run meanwhile, however long: what waits for them stays where it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "poolweave.crosspool_engine.worker_process._STOPPED_S", math.inf
        )  # a starved machine passes any limit
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
