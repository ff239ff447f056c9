"""C34: random requests, aborts, preemptions, squeezes and prefix reuse: invariants after each step, answers exact."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from poolweave.errors import OutOfBlocks
from poolweave.mempool import Blocks, MemPool
from poolweave.serving.engine import EngineConfig, LoadedModel, SamplingParams, Sequence, TorchEngine
from poolweave.types import Tier

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]  # busy machines

PROMPTS = [tuple((7 * i + 3 * j) % 490 + 2 for j in range(n)) for i, n in enumerate((1, 15, 16, 17, 31, 48, 60))]
NEW = 20
NUM_BLOCKS = 14


class Owner:
    """Plays a server: owns the sequences, indexes what has ended, frees, aborts, and squeezes the pool from outside."""

    def __init__(self, model: LoadedModel, pool: MemPool, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = pool
        self.engine = TorchEngine(model, pool, EngineConfig(step_tokens=24, max_sequences=5))
        self.live: dict[str, Sequence] = {}
        self.ended: list[Sequence] = []
        self.squeezed: list[Blocks] = []
        self.seen: Counter[str] = Counter()

    def add(self) -> None:
        if len(self.live) >= 9:
            return
        tokens = self.random.choice(PROMPTS)
        sequence = Sequence(str(sum(self.seen.values())), list(tokens), SamplingParams(max_new_tokens=NEW))
        with self.pool.match(tokens[: (len(tokens) - 1) // 16 * 16]) as hit:
            sequence.num_computed = hit.num_tokens
            sequence.blocks = hit.take()
        self.seen["reused" if sequence.num_computed else "cold"] += 1
        self.engine.add(sequence)
        self.live[sequence.request_id] = sequence

    def abort(self) -> None:
        if self.live:
            sequence = self.random.choice(list(self.live.values()))
            self.seen["aborted in " + ("decode" if sequence.num_answer else "prefill or queue")] += 1
            assert self.engine.cancel(sequence.request_id)
            if self.random.random() < 0.3:
                assert self.engine.cancel(sequence.request_id)  # twice is harmless

    def squeeze(self) -> None:
        try:
            self.squeezed.append(self.pool.alloc(self.random.randint(1, NUM_BLOCKS)))
        except OutOfBlocks:
            self.seen["squeeze refused"] += 1

    def relax(self) -> None:
        if self.squeezed:
            self.pool.free(self.squeezed.pop())

    def step(self) -> None:
        for event in self.engine.step():
            sequence = self.live[event.request_id]
            if event.finish_reason is not None:
                self.end(self.live.pop(event.request_id))
            elif event.token is not None:
                assert sequence.tokens[-1] == event.token
        self.seen["stalled"] += self.engine.stalled

    def end(self, sequence: Sequence) -> None:
        """Index the whole blocks that were computed, as a flow does, and let go."""
        whole = sequence.num_computed // 16
        self.pool.seal(sequence.blocks[:whole])
        if self.random.random() < 0.5:
            self.pool.insert(sequence.tokens[: whole * 16], sequence.blocks[:whole])
        self.pool.free(sequence.blocks)
        self.ended.append(sequence)
        self.seen["preempted"] += sequence.num_preemptions


@pytest.mark.parametrize("seed", range(2))
def test_requests_survive_aborts_preemptions_and_squeezes(seed: int, loaded: Any, make_pool: Any, greedy: Any) -> None:
    pool = make_pool(loaded("llama_small"), num_blocks=NUM_BLOCKS)
    owner = Owner(loaded("llama_small"), pool, seed)
    actions = [owner.add] * 3 + [owner.abort] + [owner.squeeze] * 3 + [owner.relax] * 3 + [owner.step] * 9
    for _ in range(2500):
        owner.random.choice(actions)()
        owner.engine.check()
        pool.check()
    while owner.squeezed:
        owner.relax()
    while owner.engine.has_work:
        owner.step()
        pool.check()
    for sequence in owner.ended:
        prompt = tuple(sequence.tokens[: sequence.num_prompt])
        expected = greedy("llama_small", prompt, NEW)
        assert sequence.finish_reason in ("length", "cancelled")
        assert sequence.answer == expected[: len(sequence.answer)]
        assert len(sequence.answer) == NEW or sequence.finish_reason == "cancelled"
    tier = pool.stats().tiers[Tier.HBM]
    assert (tier.active, tier.free + tier.historical) == (0, NUM_BLOCKS)
    for event in ("reused", "cold", "preempted", "stalled", "aborted in decode", "aborted in prefill or queue"):
        assert owner.seen[event], f"never {event}"
