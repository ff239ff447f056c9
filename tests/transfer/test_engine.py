"""The contract of every transport, end to end between two engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import numpy as np
import pytest
from ref_transfer_world import LAYOUT, World, same_kv

from poolweave.errors import (
    ConfigError,
    DuplicateTransfer,
    InstanceClosed,
    LayoutMismatch,
    NotSealed,
    OutOfBlocks,
    StaleEpoch,
    TransferFailed,
    TransferTimeout,
    UnknownBlock,
    UnknownPeer,
)
from poolweave.transfer import KVLayout, Shipment
from poolweave.types import Tier

MakeWorld = Callable[[str], World]


def test_a_transfer_brings_equal_bytes_and_gives_all_references_back(world: World) -> None:
    a, b = world.pair()
    shipment = a.shipment(5, tag=b"r")
    report = a.engine.offer(b.name, shipment).result(10)
    assert (report.num_blocks, report.pulled_blocks, report.nbytes) == (5, 5, 5 * LAYOUT.block_bytes)
    with b.engine.receive(b"r", 10) as got:
        assert got.num_tokens == 80
        assert same_kv(a, shipment.blocks, b, got.blocks)
    assert b.store.in_use() == 0
    assert a.store.in_use() == 5
    assert sum(a.store.loans.values()) == 0
    world.check()


def test_only_what_the_receiver_lacks_is_pulled(world: World) -> None:
    a, b = world.pair()
    tokens = a.tokens(6)
    first = Shipment(blocks=a.store.make(4), num_tokens=64, tokens=tokens[:64], insert=True)
    assert a.engine.offer(b.name, first).result(10).pulled_blocks == 4
    assert b.store.in_use() == 4  # nobody asked by tag: only the index holds them
    longer = Shipment(
        blocks=np.concatenate([first.blocks, a.store.make(2, seed=1)]), num_tokens=96, tokens=tokens, tag=b"x"
    )
    report = a.engine.offer(b.name, longer).result(10)
    assert (report.num_blocks, report.pulled_blocks) == (6, 2)
    with b.engine.receive(b"x", 10) as got:
        assert same_kv(a, longer.blocks, b, got.blocks)
        assert np.array_equal(got.tokens, tokens)


def test_another_identity_is_no_hit(world: World) -> None:
    a, b = world.pair()
    tokens = a.tokens(2)
    for identity in (bytes(16), b"\1" * 16):
        shipment = a.shipment(2, tokens=tokens, insert=True, identity=identity)
        assert a.engine.offer(b.name, shipment).result(10).pulled_blocks == 2


@pytest.mark.parametrize("orders", [("aggregated", "layered"), ("layered", "aggregated"), ("layered", "layered")])
def test_orders_are_copied_onto_each_other(world: World, orders: tuple[str, str]) -> None:
    a, b = (
        world.node(layout=KVLayout(num_layers=3, kv_heads=2, head_dim=8, order=order))  # type: ignore[arg-type]
        for order in orders
    )
    a.engine.connect(b.name, b.engine.address)
    shipment = a.shipment(4, tag=b"o")
    a.engine.offer(b.name, shipment).result(10)
    with b.engine.receive(b"o", 10) as got:
        assert same_kv(a, shipment.blocks, b, got.blocks)


def test_both_tiers_send_and_receive(world: World) -> None:
    a, b = world.pair(num_slots=4)
    blocks = np.concatenate([a.store.make(2, 1, Tier.HBM), a.store.make(4, 2, Tier.DRAM)])
    shipment = Shipment(blocks=blocks, num_tokens=96, tag=b"t", on_demand=Tier.HBM | Tier.DRAM)
    a.engine.offer(b.name, shipment).result(10)
    with b.engine.receive(b"t", 10) as got:
        assert same_kv(a, blocks, b, got.blocks)


def test_a_partial_last_block_travels_with_its_length(world: World) -> None:
    a, b = world.pair()
    blocks = a.store.make(3)
    a.engine.offer(b.name, Shipment(blocks=blocks, num_tokens=33, tag=b"p")).result(10)
    with b.engine.receive(b"p", 10) as got:
        assert got.num_tokens == 33
        assert [handle in b.store.sealed for handle in got.blocks.tolist()] == [True, True, False]


def test_private_is_told_to_the_store(world: World) -> None:
    a, b = world.pair()
    a.engine.offer(b.name, a.shipment(1, tag=b"p", private=True)).result(10)
    got = b.engine.receive(b"p", 10)
    assert set(got.blocks.tolist()) == b.store.private
    b.store.release(got.take())
    with pytest.raises(ConfigError):
        got.take()


def test_nothing_to_send_arrives_as_nothing(world: World) -> None:
    a, b = world.pair()
    assert a.engine.offer(b.name, a.shipment(0, tag=b"0")).result(10).num_blocks == 0
    with b.engine.receive(b"0", 10) as got:
        assert (len(got.blocks), got.num_tokens) == (0, 0)


def test_a_receiver_may_wait_before_the_offer_is_made(world: World) -> None:
    a, b = world.pair()
    waiting = threading.Thread(target=lambda: b.engine.receive(b"w", 20).close())
    waiting.start()
    a.engine.offer(b.name, a.shipment(2, tag=b"w")).result(10)
    waiting.join(20)
    assert not waiting.is_alive()
    assert b.store.in_use() == 0


def test_reserved_blocks_are_used_and_the_rest_goes_back(world: World) -> None:
    a, b = world.pair()
    dst = a.engine.reserve(b.name, 4)
    assert b.store.in_use() == 4
    a.engine.offer(b.name, a.shipment(3, tag=b"d", dst=dst, on_demand=None)).result(10)
    assert b.store.in_use() == 3
    b.engine.receive(b"d", 10).close()
    assert b.store.in_use() == 0
    again = a.engine.offer(b.name, a.shipment(3, tag=b"e", dst=dst, on_demand=None))
    with pytest.raises(StaleEpoch):
        again.result(10)


def test_a_reservation_can_be_given_back_and_can_fail(world: World) -> None:
    a, b = world.pair(num_slots=4)
    with pytest.raises(OutOfBlocks) as caught:
        a.engine.reserve(b.name, 5)
    assert (caught.value.needed, caught.value.free) == (5, 4)
    a.engine.unreserve(a.engine.reserve(b.name, 4))
    a.engine.reserve(b.name, 4)  # the same connection: in order


def test_no_room_at_the_receiver_is_told_with_its_figures(world: World) -> None:
    a, b = world.pair(num_slots=4)
    keep = b.store.make(2)
    with pytest.raises(OutOfBlocks) as caught:
        a.engine.offer(b.name, a.shipment(3, tag=b"n")).result(10)
    assert (caught.value.needed, caught.value.free) == (3, 2)
    with pytest.raises(OutOfBlocks):
        b.engine.receive(b"n", 10)
    b.store.release(keep)
    a.engine.offer(b.name, Shipment(blocks=a.store.make(1), num_tokens=16, tag=b"n")).result(10)
    b.engine.receive(b"n", 10).close()


def test_only_sealed_and_known_blocks_can_be_sent(world: World) -> None:
    """C22: a block is never read before its producer has finished."""
    a, b = world.pair()
    with pytest.raises(NotSealed):
        a.engine.offer(b.name, Shipment(blocks=a.store.alloc(1), num_tokens=16))
    with pytest.raises(UnknownBlock):
        a.engine.offer(b.name, Shipment(blocks=np.array([99], np.uint64), num_tokens=16))
    world.check()


def test_the_same_tag_twice_is_refused_and_both_sides_live(world: World) -> None:
    """C27."""
    a, b = world.pair()
    first = a.shipment(1, tag=b"same")
    a.engine.offer(b.name, first).result(10)
    with pytest.raises(DuplicateTransfer):
        a.engine.offer(b.name, a.shipment(1, tag=b"same")).result(10)
    with b.engine.receive(b"same", 10) as got:
        assert same_kv(a, first.blocks, b, got.blocks)
    a.engine.offer(b.name, a.shipment(1, tag=b"same")).result(10)  # claimed: the tag is free again
    b.engine.receive(b"same", 10).close()
    world.check()


def test_unlike_layouts_are_refused_before_a_byte_moves(world: World) -> None:
    """C15."""
    a = world.node()
    others = [
        KVLayout(num_layers=2, kv_heads=2, head_dim=8, dtype="float32"),
        KVLayout(num_layers=2, kv_heads=2, head_dim=8, dtype="bfloat16"),
        KVLayout(num_layers=2, kv_heads=2, head_dim=8, block_tokens=32),
        KVLayout(num_layers=3, kv_heads=2, head_dim=8),
    ]
    for layout in others:
        b = world.node(layout=layout)
        a.engine.connect(b.name, b.engine.address)
        with pytest.raises(LayoutMismatch) as caught:
            a.engine.offer(b.name, a.shipment(1, tag=b"l")).result(10)
        assert caught.value.ours == layout.fingerprint()
        assert caught.value.theirs == LAYOUT.fingerprint()
        assert b.store.commits == 0
        assert b.store.in_use() == 0


def test_cancel_gives_the_blocks_back_and_drops_what_arrived(world: World) -> None:
    a, b = world.pair()
    done = a.engine.offer(b.name, a.shipment(2, tag=b"c"))
    done.result(10)
    assert not done.cancel()  # too late: it was done
    b.engine.receive(b"c", 10).close()
    with pytest.raises(TransferTimeout):
        b.engine.receive(b"never", 0.01)


def test_unknown_peers_and_wrong_names(world: World) -> None:
    a, b = world.pair()
    with pytest.raises(UnknownPeer):
        a.engine.offer("nobody", a.shipment(1))
    a.engine.connect("somebody", b.engine.address)
    with pytest.raises(UnknownPeer):
        a.engine.offer("somebody", a.shipment(1)).result(10)


def test_a_peer_that_is_not_there_fails_fast(world: World) -> None:
    a, b = world.pair()
    b.engine.close()
    with pytest.raises(TransferFailed, match="cannot be reached"):
        a.engine.offer(b.name, a.shipment(1)).result(10)
    assert sum(a.store.loans.values()) == 0


def test_closing_ends_transfers_and_waits(world: World) -> None:
    a, b = world.pair()
    errors = []

    def wait() -> None:
        try:
            b.engine.receive(b"never", 20)
        except InstanceClosed as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    a.engine.offer(b.name, a.shipment(1, tag=b"unclaimed")).result(10)
    b.engine.close()
    waiting.join(20)
    assert b.store.in_use() == 0
    assert len(errors) == 1
    a.engine.close()
    with pytest.raises(InstanceClosed):
        a.engine.offer(b.name, a.shipment(1))
    with pytest.raises(InstanceClosed):
        b.engine.receive(b"x", 1)


def test_transfers_can_be_awaited(world: World) -> None:
    a, b = world.pair()

    async def many() -> list[int]:
        going = [a.engine.offer(b.name, a.shipment(1, tag=b"%d" % i)) for i in range(8)]
        return [(await one).pulled_blocks for one in going]

    assert asyncio.run(many()) == [1] * 8
    for i in range(8):
        b.engine.receive(b"%d" % i, 10).close()


def test_many_threads_send_both_ways(world: World) -> None:
    a, b = world.pair(num_slots=64)
    problems: list[BaseException] = []

    def send(source: int, worker: int) -> None:
        here, there = (a, b) if source else (b, a)
        blocks = here.store.make(2, worker)
        try:
            for i in range(20):
                tag = b"%d-%d-%d" % (source, worker, i)
                here.engine.offer(there.name, Shipment(blocks=blocks, num_tokens=32, tag=tag)).result(20)
                with there.engine.receive(tag, 20) as got:
                    assert same_kv(here, blocks, there, got.blocks)
        except BaseException as error:  # noqa: BLE001  # shown by the assertion below
            problems.append(error)

    threads = [threading.Thread(target=send, args=(s, w)) for s in (0, 1) for w in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []
    world.check()
    assert a.engine.stats().sending.done == 60


def test_memory_without_descriptors_needs_another_transport(make_world: MakeWorld) -> None:
    with pytest.raises(ConfigError, match="cannot be mapped"):
        make_world("shm").node(mappable=False)
    for listen in ("tcp", "inproc"):
        a, b = make_world(listen).pair(mappable=False)
        shipment = a.shipment(2, tag=b"m")
        a.engine.offer(b.name, shipment).result(10)
        with b.engine.receive(b"m", 10) as got:
            assert same_kv(a, shipment.blocks, b, got.blocks)
