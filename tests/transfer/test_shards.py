"""Transfers between instances that hold different shards of a model: put together, or taken apart, by the receiver."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from ref_transfer_world import Node, World

from poolweave.errors import ConfigError, DuplicateTransfer, LayoutMismatch, PoolweaveError, TransferFailed
from poolweave.transfer import KVLayout, Shipment
from poolweave.transfer.resharding import Cut

BLOCKS = 3


def model(heads: int = 4, layers: int = 4) -> KVLayout:
    return KVLayout(num_layers=layers, kv_heads=heads, head_dim=4, block_tokens=4)


@dataclass
class Side:
    """The instances of one cut of a model, each with its shard of the same KV."""

    nodes: list[Node]
    cut: Cut

    @classmethod
    def of(cls, world: World, cut: Cut) -> Side:
        return cls([world.node(layout=shard.layout, shard=shard) for shard in cut.shards], cut)

    def make(self, whole: np.ndarray[Any, Any], growing: bool) -> list[np.ndarray[Any, Any]]:
        made = []
        for node, shard in zip(self.nodes, self.cut.shards, strict=True):
            blocks = node.store.alloc(len(whole))
            for handle, block in zip(blocks.tolist(), whole, strict=True):
                node.store.view(handle)[...] = part_of(shard, block)
            if not growing:
                node.store.seal(blocks)
            made.append(blocks)
        return made


def part_of(shard: Any, block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    layers, heads = shard.layers, shard.heads
    return block[layers.start : layers.stop, :, :, heads.start : heads.stop]


def whole_kv(layout: KVLayout, seed: int = 0) -> np.ndarray[Any, Any]:
    shape = (BLOCKS, layout.num_layers, len(layout.parts), layout.block_tokens, layout.kv_heads, layout.head_dim)
    return np.random.default_rng(seed).integers(0, 100, shape).astype(layout.numpy_dtype)


def connect(source: Side, target: Side) -> None:
    for a in source.nodes:
        for b in target.nodes:
            a.engine.connect(b.name, b.engine.address)


CUTS = [
    ({"tp": 2}, {"tp": 1}, 4), ({"tp": 1}, {"tp": 2}, 4), ({"tp": 4}, {"tp": 2}, 2), ({"tp": 2}, {"tp": 4}, 1),
    ({"pp": 2}, {"tp": 2}, 2), ({"tp": 2, "pp": 2}, {"pp": 3}, 4),
]  # fmt: skip


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize(("source", "target", "heads"), CUTS)
def test_any_cut_arrives_as_any_cut(world: World, source: Any, target: Any, heads: int, growing: bool) -> None:
    layout = model(heads)
    ours, theirs = (Side.of(world, Cut(layout=layout, **one)) for one in (source, target))
    connect(ours, theirs)
    check_transfer(ours, theirs, whole_kv(layout), growing)
    world.check()


@pytest.mark.parametrize(("source", "target"), [({"tp": 2}, {"tp": 1}), ({"tp": 1}, {"tp": 2})])
def test_latents_are_sent_once(world: World, source: Any, target: Any) -> None:
    layout = KVLayout.mla(num_layers=2, rank=6, rope=2, block_tokens=4)
    ours, theirs = (Side.of(world, Cut(layout=layout, **one)) for one in (source, target))
    connect(ours, theirs)
    sent = check_transfer(ours, theirs, whole_kv(layout), growing=False)
    assert sent == len(theirs.nodes) * BLOCKS * layout.block_bytes


def check_transfer(ours: Side, theirs: Side, whole: np.ndarray[Any, Any], growing: bool) -> int:
    """Every rank sends to every rank; each gets its shard of the same KV. -> bytes moved"""
    blocks = ours.make(whole, growing)
    layout = ours.cut.layout
    tokens = np.arange(BLOCKS * layout.block_tokens, dtype=np.int32)
    pending = []
    for node, mine in zip(ours.nodes, blocks, strict=True):
        for other in theirs.nodes:
            shipment = Shipment(
                blocks=mine, num_tokens=len(tokens), tokens=tokens, insert=True, tag=b"t", growing=growing
            )
            pending.append((node, mine, node.engine.offer(other.name, shipment)))
    if growing:
        for layer in range(max(len(shard.layers) for shard in ours.cut.shards)):
            for node, mine, transfer in pending:
                layers = min(layer + 1, node.store.layout.num_layers)
                node.store.seal(mine, layers)
                transfer.ready(layers)
    moved = sum(transfer.result(60).nbytes for _, _, transfer in pending)
    for node, shard in zip(theirs.nodes, theirs.cut.shards, strict=True):
        with node.engine.receive(b"t", 60) as got:
            for handle, block in zip(got.blocks.tolist(), whole, strict=True):
                assert np.array_equal(node.store.view(handle), part_of(shard, block))
        assert len(node.store.indexed) == BLOCKS
    assert not any(sum(node.store.loans.values()) for node in ours.nodes)
    return moved


def test_what_the_receiver_has_is_not_sent_by_any_rank(world: World) -> None:
    layout = model()
    ours, theirs = Side.of(world, Cut(layout=layout, tp=2)), Side.of(world, Cut(layout=layout))
    connect(ours, theirs)
    check_transfer(ours, theirs, whole_kv(layout), growing=False)
    assert check_transfer(ours, theirs, whole_kv(layout), growing=False) == 0


def test_models_and_cuts_that_do_not_fit_are_refused(world: World) -> None:
    ours = Side.of(world, Cut(layout=model(heads=6), tp=3))
    for other in (Cut(layout=model(heads=4), tp=2), Cut(layout=model(heads=6, layers=3), tp=3)):
        theirs = Side.of(world, other)
        connect(ours, theirs)
        node = ours.nodes[0]
        with pytest.raises(LayoutMismatch):
            node.engine.offer(theirs.nodes[0].name, node.shipment(1, tag=b"no")).result(60)
    with pytest.raises(ConfigError, match="6 KV heads cannot be cut for tp=4"):
        Cut(layout=model(heads=6), tp=4)
    with pytest.raises(LayoutMismatch, match="give it that shard's layout"):
        world.node(layout=model(), shard=Cut(layout=model(), tp=2).shards[0])


def test_parts_need_a_tag_and_come_once(world: World) -> None:
    layout = model()
    ours, theirs = Side.of(world, Cut(layout=layout, tp=2)), Side.of(world, Cut(layout=layout))
    connect(ours, theirs)
    first, target = ours.nodes[0], theirs.nodes[0].name
    with pytest.raises(ConfigError, match="tag"):
        first.engine.offer(target, first.shipment(1)).result(60)
    waiting = first.engine.offer(target, first.shipment(1, tag=b"p"))
    with pytest.raises(DuplicateTransfer):
        first.engine.offer(target, first.shipment(1, tag=b"p"))
    second = ours.nodes[1]
    with pytest.raises(TransferFailed, match="differ"):
        second.engine.offer(target, second.shipment(2, tag=b"p")).result(60)
    second.engine.offer(target, second.shipment(1, tag=b"p")).result(60)
    assert waiting.result(60).pulled_blocks == 1
    theirs.nodes[0].engine.receive(b"p", 60).close()


def test_one_lost_part_fails_all(world: World) -> None:
    layout = model()
    ours, theirs = Side.of(world, Cut(layout=layout, tp=2)), Side.of(world, Cut(layout=layout))
    connect(ours, theirs)
    (first, second), target = ours.nodes, theirs.nodes[0]
    whole = first.engine.offer(target.name, first.shipment(1, tag=b"p"))
    shipment = Shipment(blocks=second.store.alloc(1), num_tokens=4, tag=b"p", growing=True)
    part = second.engine.offer(target.name, shipment)
    target.engine.follow(b"p", 60)
    end = time.monotonic() + 60
    while target.engine.stats().receiving.pulling < 2:
        assert time.monotonic() < end
        time.sleep(0.001)
    part.cancel()
    with pytest.raises(PoolweaveError, match="took the transfer back"):
        whole.result(60)
    while target.store.in_use():
        assert time.monotonic() < end
        time.sleep(0.001)
