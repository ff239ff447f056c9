"""Transfers of KV that is still computed: what is sealed is pulled while the rest is not there yet."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ref_transfer_world import Node, World, same_kv
from ref_waiting import until

from poolweave.errors import ConfigError, NotSealed, PeerLost, PoolweaveError, TransferFailed, TransferTimeout
from poolweave.transfer import KVLayout, Shipment
from poolweave.transfer.growth import Coverage, Stretch

LAYOUT = KVLayout(num_layers=4, kv_heads=2, head_dim=8)
STEP = LAYOUT.block_tokens


def unsealed(node: Node, n: int, seed: int = 0, **more: Any) -> Shipment:
    blocks = node.store.alloc(n)
    node.store.fill(blocks, seed)
    return Shipment(blocks=blocks, num_tokens=n * STEP, growing=True, **more)


def grow(node: Node, shipment: Shipment, transfer: Any, layers: int, num_blocks: int | None = None) -> None:
    node.store.seal(shipment.blocks[:num_blocks], layers)
    transfer.ready(layers, num_blocks)


@pytest.mark.parametrize("orders", [("aggregated", "aggregated"), ("layered", "token_major")])
def test_each_layer_comes_before_the_next_is_sealed(world: World, orders: tuple[str, str]) -> None:
    a, b = (world.node(layout=KVLayout(num_layers=4, kv_heads=2, head_dim=8, order=order)) for order in orders)  # type: ignore[arg-type]
    a.engine.connect(b.name, b.engine.address)
    shipment = unsealed(a, 5, tag=b"g")
    transfer = a.engine.offer(b.name, shipment)
    arriving = b.engine.follow(b"g", 60)
    for layer in range(4):
        grow(a, shipment, transfer, layer + 1)
        arriving.wait(layer + 1, timeout=60)
        assert arriving.layers == layer + 1
        for ours, theirs in zip(shipment.blocks.tolist(), arriving.blocks.tolist(), strict=True):
            assert np.array_equal(a.store.view(ours)[: layer + 1], b.store.view(theirs)[: layer + 1])
    report = transfer.result(60)
    assert (report.pulled_blocks, report.nbytes) == (5, 5 * LAYOUT.block_bytes)
    assert report.early_nbytes == 5 * LAYOUT.block_bytes * 3 // 4
    with b.engine.receive(b"g", 60) as got:
        assert same_kv(a, shipment.blocks, b, got.blocks)
        assert all(handle in b.store.sealed for handle in got.blocks.tolist())
    world.check()
    assert b.store.in_use() == 0
    assert not sum(a.store.loans.values())


def test_blocks_may_come_before_layers(world: World) -> None:
    a, b = world.node(layout=LAYOUT), world.node(layout=LAYOUT)
    a.engine.connect(b.name, b.engine.address)
    tokens = a.tokens(6)
    known = Shipment(blocks=a.store.make(2), num_tokens=2 * STEP, tokens=tokens[: 2 * STEP], insert=True)
    a.engine.offer(b.name, known).result(60)
    fresh = unsealed(a, 4, seed=3)
    shipment = Shipment(
        blocks=np.concatenate([known.blocks, fresh.blocks]), num_tokens=6 * STEP, tokens=tokens, insert=True,
        growing=True, tag=b"c",
    )  # fmt: skip
    transfer = a.engine.offer(b.name, shipment)
    transfer.ready(num_blocks=2)  # a prefix from the index is sealed, and known at the receiver
    for count in (4, 6):
        for layers in (2, 4):
            grow(a, shipment, transfer, layers, count)
    report = transfer.result(60)
    assert (report.num_blocks, report.pulled_blocks, report.nbytes) == (6, 4, 4 * LAYOUT.block_bytes)
    with b.engine.receive(b"c", 60) as got:
        assert same_kv(a, shipment.blocks, b, got.blocks)
        assert b.store.commits == 2
    world.check()


def test_only_what_is_sealed_can_be_called_ready(world: World) -> None:
    a, b = world.pair(layout=LAYOUT, max_in_flight_bytes=1)
    shipment = unsealed(a, 2, tag=b"n")
    transfer = a.engine.offer(b.name, shipment)
    b.engine.follow(b"n", 60)
    a.store.seal(shipment.blocks, 1)
    with pytest.raises(NotSealed, match="block 0 of this transfer has 1 sealed layers, 2 were"):
        transfer.ready(2)
    for bad in ({"layers": 5}, {"num_blocks": 3}, {"layers": -1}):
        with pytest.raises(ConfigError):
            transfer.ready(**bad)
    sealed = a.engine.offer(b.name, a.shipment(1, tag=b"s"))  # waits for the first to end
    with pytest.raises(ConfigError, match="growing"):
        sealed.ready(1, 1)
    assert transfer.cancel()
    transfer.ready()  # nothing happens any more
    with pytest.raises(TransferFailed):
        b.engine.receive(b"n", 60)
    until(lambda: b.store.in_use() == 1, "the cancelled placement's release")
    b.engine.receive(b"s", 60).close()


def test_the_receiver_gives_up_when_no_more_comes(world: World) -> None:
    a, b = world.pair(layout=LAYOUT)
    shipment = unsealed(a, 2, tag=b"l", lease_s=0.2)
    transfer = a.engine.offer(b.name, shipment)
    grow(a, shipment, transfer, 1)
    with pytest.raises(TransferTimeout):
        transfer.result(60)
    until(lambda: b.store.in_use() == 0, "the release of a placement that nobody fills")
    world.check()


def test_a_lost_sender_releases_what_was_placed(world: World) -> None:
    a, b = world.pair(layout=LAYOUT)
    shipment = unsealed(a, 2, tag=b"x")
    transfer = a.engine.offer(b.name, shipment)
    arriving = b.engine.follow(b"x", 60)
    grow(a, shipment, transfer, 1)
    arriving.wait(1, timeout=60)
    a.engine.close()
    with pytest.raises(PoolweaveError):
        arriving.wait(2, timeout=60)
    with pytest.raises((PeerLost, TransferFailed)):
        b.engine.receive(b"x", 60)
    until(lambda: b.store.in_use() == 0, "the release")


def test_a_torn_stretch_fails_its_checksum(world: World) -> None:
    a, b = world.pair(layout=LAYOUT)
    shipment = unsealed(a, 2, tag=b"k")
    transfer = a.engine.offer(b.name, shipment)
    b.engine.follow(b"k", 60)
    a.store.seal(shipment.blocks, 2)
    honest = a.engine._sender._grower._checksums
    a.engine._sender._grower._tell_peer = _after(lambda: _scribble(a, shipment), a.engine._sender._tell_ready)
    assert honest is not None
    transfer.ready(2)
    with pytest.raises(TransferFailed, match="wrong checksums"):
        transfer.result(60)
    until(lambda: b.store.in_use() == 0, "the release")


def _after(action: Any, call: Any) -> Any:
    def both(*arguments: Any) -> Any:
        action()
        return call(*arguments)

    return both


def _scribble(node: Node, shipment: Shipment) -> None:
    node.store.view(int(shipment.blocks[1]))[0] += 1


def test_a_growing_offer_waits_for_its_turn_with_what_is_ready(world: World) -> None:
    a, b = world.pair(layout=LAYOUT, max_in_flight_bytes=1)
    first, second = unsealed(a, 1, tag=b"1"), unsealed(a, 1, seed=1, tag=b"2")
    transfers = [a.engine.offer(b.name, one) for one in (first, second)]
    grow(a, second, transfers[1], 4)
    assert not transfers[1].done()
    grow(a, first, transfers[0], 4)
    for transfer, shipment in zip(transfers, (first, second), strict=True):
        transfer.result(60)
        with b.engine.receive(shipment.tag, 60) as got:
            assert same_kv(a, shipment.blocks, b, got.blocks)


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of LAYOUT make a stretch of sealed blocks; four are many."""
    for module in ("growing", "launcher"):
        monkeypatch.setattr(f"poolweave.transfer.{module}.STRETCH_BYTES", 2 * LAYOUT.block_bytes)


@pytest.mark.usefixtures("few_at_once")
def test_many_sealed_blocks_are_pulled_while_their_checksums_are_made(world: World) -> None:
    a, b = world.pair(layout=LAYOUT)
    a.engine.offer(b.name, a.shipment(1)).result(60)  # dials
    shipment, tokens = a.shipment(5, seed=1, tag=b"m"), a.tokens(5)
    shipment.tokens, shipment.insert = tokens, True
    transfer = a.engine.offer(b.name, shipment)
    with pytest.raises(ConfigError, match="growing"):
        transfer.ready()
    report = transfer.result(60)
    assert (report.pulled_blocks, report.nbytes) == (5, 5 * LAYOUT.block_bytes)
    assert report.steps == 3
    with b.engine.receive(b"m", 60) as got:
        assert same_kv(a, shipment.blocks, b, got.blocks)
    again = Shipment(blocks=shipment.blocks, num_tokens=5 * STEP, tag=b"again")
    assert a.engine.offer(b.name, again).result(60).steps == 1  # they are known by now
    b.engine.receive(b"again", 60).close()
    world.check()


@pytest.mark.usefixtures("few_at_once")
def test_a_torn_stretch_of_many_sealed_blocks_fails_its_checksum(world: World) -> None:
    a, b = world.pair(layout=LAYOUT)
    a.engine.offer(b.name, a.shipment(1)).result(60)
    shipment = a.shipment(5, seed=1, tag=b"t")
    a.engine._sender._grower._tell_peer = _after(lambda: _scribble(a, shipment), a.engine._sender._tell_ready)
    transfer = a.engine.offer(b.name, shipment)
    with pytest.raises(TransferFailed, match="wrong checksums"):
        transfer.result(60)
    until(lambda: b.store.in_use() == 0, "the release")
    assert not sum(a.store.loans.values())


@pytest.mark.usefixtures("few_at_once")
def test_many_sealed_blocks_that_must_wait_are_hashed_before(world: World) -> None:
    a, b = world.pair(layout=LAYOUT, max_in_flight_bytes=1)
    a.engine.offer(b.name, a.shipment(1)).result(60)
    first, second = unsealed(a, 1, tag=b"1"), a.shipment(5, seed=1, tag=b"2")
    growing = a.engine.offer(b.name, first)
    waiting = a.engine.offer(b.name, second)
    grow(a, first, growing, 4)
    assert waiting.result(60).steps == 1
    with b.engine.receive(b"2", 60) as got:
        assert same_kv(a, second.blocks, b, got.blocks)
    b.engine.receive(b"1", 60).close()


@pytest.mark.usefixtures("few_at_once")
def test_many_sealed_blocks_whose_place_was_taken_meanwhile_are_not_hashed_by_the_loop(world: World) -> None:
    a, b = world.pair(layout=LAYOUT, max_in_flight_bytes=1)
    a.engine.offer(b.name, a.shipment(1)).result(60)
    quick = unsealed(a, 1, tag=b"1")
    growing: list[Any] = []
    launcher = a.engine._sender._launcher
    prepare, of_loan = launcher.prepare, launcher._checksums.of_loan
    hashing: set[str] = set()

    def overtaken(*args: Any, **more: Any) -> Any:
        launcher.prepare = prepare
        offer = prepare(*args, **more)
        growing.append(a.engine.offer(b.name, quick))
        return offer

    def watched(*args: Any) -> Any:
        hashing.add(threading.current_thread().name)
        return of_loan(*args)

    launcher.prepare, launcher._checksums.of_loan = overtaken, watched
    slow = a.shipment(5, seed=1, tag=b"2")
    waiting = a.engine.offer(b.name, slow)
    grow(a, quick, growing[0], 4)
    assert waiting.result(60).steps == 1
    assert hashing == {threading.current_thread().name}
    with b.engine.receive(b"2", 60) as got:
        assert same_kv(a, slow.blocks, b, got.blocks)
    b.engine.receive(b"1", 60).close()


def test_nothing_grows_at_once(world: World) -> None:
    a, b = world.pair(layout=LAYOUT)
    empty = Shipment(blocks=np.empty(0, np.uint64), num_tokens=0, tag=b"0", growing=True)
    assert a.engine.offer(b.name, empty).result(60).num_blocks == 0
    b.engine.receive(b"0", 60).close()
    with pytest.raises(TransferTimeout, match="no growing transfer"):
        b.engine.follow(b"never", 0.01)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), max_size=12))
def test_missing_stretches_fill_every_cell_once(steps: list[tuple[int, int]]) -> None:
    coverage, cells = Coverage(6, range(5)), np.zeros((6, 5), int)
    for count, layers in [*steps, (6, 5)]:
        for stretch in coverage.missing(layers, 0, count):
            coverage.add(stretch)
            cells[stretch.first_block : stretch.end_block, stretch.first_layer : stretch.end_layer] += 1
        assert (cells[:count, :layers] == 1).all()
        assert coverage.share == pytest.approx(cells.mean())
    assert coverage.complete
    assert (cells == 1).all()


def test_a_gap_or_a_second_time_is_refused() -> None:
    coverage = Coverage(3, range(4))
    coverage.add(Stretch(0, 2, 0, 2))
    for bad in ((0, 3, 2, 3), (0, 1, 0, 1), (2, 4, 0, 1), (0, 2, 2, 5), (2, 3, 1, 2)):
        with pytest.raises(ConfigError):
            coverage.add(Stretch(*bad))
    with pytest.raises(ConfigError):
        Stretch(1, 1, 0, 1)
