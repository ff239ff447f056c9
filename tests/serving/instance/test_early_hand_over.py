"""A prompt's KV leaves its instance while it is computed: layer by layer, chunk by chunk, and always whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from poolweave.errors import ConfigError
from poolweave.mempool import MemPool
from poolweave.serving.engine.sequence import Sequence
from poolweave.serving.instance.early_hand_over import EarlyHandOver
from poolweave.serving.instance.granularity import HandOverPolicy
from poolweave.transfer import KVLayout, TransferReport

LAYOUT = KVLayout(num_layers=6, kv_heads=2, head_dim=4, block_tokens=4, dtype="float32")
_names = itertools.count()


@pytest.fixture
def pools() -> Iterator[tuple[MemPool, MemPool]]:
    with MemPool(LAYOUT, hbm=64 * LAYOUT.block_bytes) as ours, MemPool(LAYOUT, hbm=64 * LAYOUT.block_bytes) as theirs:
        ours.connect(theirs.instance, theirs.address)
        yield ours, theirs
        for pool in (ours, theirs):
            pool.check()


@dataclass
class Prompt:
    """A prompt computed by hand: what an engine writes and says."""

    ours: MemPool
    theirs: MemPool
    sequence: Sequence
    hand_over: EarlyHandOver
    tag: bytes

    @classmethod
    def of(cls, pools: Any, length: int, policy: HandOverPolicy, cached: int = 0) -> Prompt:
        ours, theirs = pools
        blocks = ours.alloc(LAYOUT.num_blocks(length))
        view = ours.view()
        view[ours.slots(blocks)] = np.random.default_rng(0).random(view[ours.slots(blocks)].shape)
        ours.seal(blocks[:cached])
        sequence = Sequence("r", list(range(length)), num_computed=cached * 4, blocks=blocks)
        tag = f"early-{next(_names)}".encode()

        def begin() -> Any:
            return ours.transfer(theirs.instance, blocks, tag=tag, num_tokens=length, growing=True)

        return cls(ours, theirs, sequence, EarlyHandOver(ours, sequence, policy, range(cached), begin), tag)

    def compute(self, end: int, layers: range = range(6)) -> None:
        for layer in layers:
            self.hand_over.written(layer, end)
            self.hand_over.needed(layer)

    def arrives(self) -> TransferReport:
        transfer = self.hand_over.take()
        assert transfer is not None
        with self.theirs.receive(self.tag, timeout=60) as got:
            ours = self.ours.view()[self.ours.slots(self.sequence.blocks)]
            assert (self.theirs.view()[self.theirs.slots(got.blocks)] == ours).all()
        return transfer.result(60)


@pytest.mark.parametrize("length", [1, 4, 7, 40])
@pytest.mark.parametrize("chunk", [3, 8, 100])
@pytest.mark.parametrize("granularity", ["by-layer", "auto"])
def test_every_length_arrives_whole_in_any_chunks(pools: Any, length: int, chunk: int, granularity: Any) -> None:
    prompt = Prompt.of(pools, length, HandOverPolicy(LAYOUT, granularity), cached=length // 16)
    for start in range(length // 16 * 4, length, chunk):
        prompt.compute(min(length, start + chunk))
    assert prompt.arrives().pulled_blocks == LAYOUT.num_blocks(length)


def test_layers_arrive_before_the_last_one_is_computed(pools: Any) -> None:
    prompt = Prompt.of(pools, 40, HandOverPolicy(LAYOUT, "by-layer"))
    prompt.compute(40, range(5))
    with prompt.theirs.follow(prompt.tag, timeout=60) as following:
        following.wait(5, timeout=60)
        assert following.layers == 5
        prompt.compute(40, range(5, 6))
    report = prompt.arrives()
    assert (report.steps, report.early_nbytes) == (6, report.nbytes * 5 // 6)


def test_chunks_arrive_while_the_next_one_is_computed(pools: Any) -> None:
    prompt = Prompt.of(pools, 40, HandOverPolicy(LAYOUT, "by-layer"))
    prompt.compute(21)
    with prompt.theirs.follow(prompt.tag, timeout=60) as following:
        following.wait(6, num_blocks=5, timeout=60)
        assert following.layers == 0  # of all blocks
    prompt.compute(40)
    assert prompt.arrives().early_nbytes >= 5 * LAYOUT.block_bytes


def test_a_preempted_or_unfinished_prompt_is_left_to_its_owner(pools: Any) -> None:
    policy = HandOverPolicy(LAYOUT, "by-layer")
    preempted = Prompt.of(pools, 40, policy)
    preempted.compute(40, range(2))
    preempted.sequence.num_preemptions = 1
    preempted.compute(40, range(2, 6))
    assert preempted.hand_over.take() is None
    unfinished = Prompt.of(pools, 40, policy)
    unfinished.compute(40, range(5))
    assert unfinished.hand_over.take() is None
    unfinished.hand_over.abandon()
    never_begun = Prompt.of(pools, 4, policy)
    assert never_begun.hand_over.take() is None
    assert pools[0].stats().transfer.sending.open_offers == 0


def test_a_receiver_without_room_does_not_stop_the_prompt(pools: Any) -> None:
    ours, theirs = pools
    taken = theirs.alloc(60)
    prompt = Prompt.of(pools, 40, HandOverPolicy(LAYOUT, "by-layer"))
    prompt.compute(16)
    assert prompt.hand_over._transfer is not None
    with pytest.raises(Exception, match="need 10 blocks"):
        prompt.hand_over._transfer.result(60)
    prompt.compute(40)
    assert prompt.hand_over.take() is None
    theirs.free(taken)
    assert ours.stats().transfer.sending.open_offers == 0


def test_the_policy_learns() -> None:
    policy = HandOverPolicy(LAYOUT)
    assert policy.is_early
    assert policy.layers_per_step(4) == 1  # nothing is known
    policy.observe_chunk(4, 6e-3, 1e-6)
    policy.observe_transfer(TransferReport(4, 4, 4 * LAYOUT.block_bytes, 4, 1.0, 0, 1e-5, 1))
    cheap = policy.layers_per_step(4)
    assert (6 % cheap or cheap) == 1
    for _ in range(40):
        policy.observe_chunk(4, 6e-3, 1.0)  # telling a step costs far more than computing a layer
    assert policy.layers_per_step(4) == 6
    assert HandOverPolicy(LAYOUT, "by-request").layers_per_step(4) == 6
    assert not HandOverPolicy(LAYOUT, "by-request").is_early
    with pytest.raises(ConfigError, match="by-block"):
        HandOverPolicy(LAYOUT, "by-block")  # type: ignore[arg-type]
