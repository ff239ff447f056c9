"""What is NCCL's own: chunks, lanes, a communicator that fails or never answers, and names for what is missing.

The transfers themselves are the contract suite's. Both run on stand-ins for the driver and for NCCL (ref_gpu.py);
tests/mempool/test_device.py has what runs on real GPUs.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from ref_gpu import Communicator
from ref_transfer_world import Node, World, same_kv
from ref_waiting import until

from poolweave.errors import ConfigError, TransferFailed
from poolweave.transfer import KVLayout, Shipment, TransferConfig, TransferEngine, nccl_lane
from poolweave.transfer.addresses import Address
from poolweave.transfer.data_line import DataLine, dial
from poolweave.transfer.transports import nccl

MakeWorld = Callable[[str], World]
LARGE = KVLayout(num_layers=4, kv_heads=8, head_dim=64)  # 128 KiB a block


@pytest.fixture
def hold() -> Iterator[Callable[[int], threading.Event]]:
    """hold(rank): its operations wait from now on, until the event is set."""

    def make(rank: int) -> threading.Event:
        return Communicator.held.setdefault(rank, threading.Event())

    yield make
    for gate in Communicator.held.values():
        gate.set()
    Communicator.held.clear()
    Communicator.fails.clear()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """No multiple of a block, and less than one."""
    monkeypatch.setattr(nccl_lane, "CHUNK_BYTES", 100_000)
    return 100_000


def arrives(a: Node, b: Node, blocks: Any, tag: bytes) -> bool:
    a.engine.offer(b.name, Shipment(blocks=blocks, num_tokens=16 * len(blocks), tag=tag)).result(30)
    with b.engine.receive(tag, 30) as got:
        return same_kv(a, blocks, b, got.blocks)


@pytest.mark.usefixtures("gpu", "small_chunks")
def test_blocks_cross_in_chunks(make_world: MakeWorld) -> None:
    a, b = make_world("nccl").pair(layout=LARGE)
    assert arrives(a, b, a.store.make(16, 3), b"many")
    assert arrives(b, a, b.store.make(1, 4), b"one")


@pytest.mark.usefixtures("gpu", "small_chunks")
def test_what_is_asked_on_a_lane_is_authenticated(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make_world("nccl").pair(layout=LARGE, secret=b"a secret of the cluster")
    blocks = a.store.make(4, 3)
    assert arrives(a, b, blocks, b"x")
    send = DataLine.send

    def altered(line: DataLine, payload: bytes, until: float) -> None:
        frame = bytearray(line._encoder.encode(payload))
        frame[-1] ^= 1
        line.sock.sendall(frame)

    monkeypatch.setattr(DataLine, "send", altered)
    with pytest.raises(TransferFailed):
        a.engine.offer(b.name, Shipment(blocks=blocks, num_tokens=64, tag=b"y")).result(30)
    monkeypatch.setattr(DataLine, "send", send)
    assert arrives(a, b, blocks, b"z")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "said",
    [b"", b"nonsense", msgspec.msgpack.encode(nccl.Join(b"short")), msgspec.msgpack.encode(nccl.Ask(1, 2, 3, 4))],
)
def test_a_lane_that_begins_with_nonsense_ends(make_world: MakeWorld, said: bytes) -> None:
    a, b = make_world("nccl").pair(layout=LARGE)
    line = DataLine(dial(b.engine._home, a.name, a.engine.epoch, Address.parse(a.engine.address)), None)
    line.send(said, time.monotonic() + 10)
    with pytest.raises(ConnectionError):
        line.receive(time.monotonic() + 10)
    line.close()
    assert arrives(a, b, a.store.make(4), b"x")


@pytest.mark.usefixtures("gpu")
def test_bytes_that_no_offer_has_are_not_sent(make_world: MakeWorld) -> None:
    a, b = make_world("nccl").pair(layout=LARGE)
    home, hello = b.engine._home, Mock(instance=a.name, epoch=a.engine.epoch, data_address=a.engine.address)
    assert home.memory.device is not None
    source = nccl.NcclSource(home, home.memory.device, hello)
    lane = source._open(time.monotonic() + 10)
    for ask in (nccl.Ask(1, 2, 0, 1 << 62), nccl.Ask(1 << 62, 0, 5, 6)):
        lane.line.send(msgspec.msgpack.encode(ask), time.monotonic() + 10)
        answer = msgspec.msgpack.decode(lane.line.receive(time.monotonic() + 10), type=nccl.Chunk)
        assert not answer.follows
    lane.line.send(msgspec.msgpack.encode(["ask", -1, 2, 0, 5]), time.monotonic() + 10)
    with pytest.raises(ConnectionError):
        lane.line.receive(time.monotonic() + 10)
    lane.close()


@pytest.mark.usefixtures("gpu")
def test_lanes_are_kept_and_bounded(make_world: MakeWorld) -> None:
    a, b = make_world("nccl").pair(layout=LARGE, connections=2, num_slots=64)
    blocks = a.store.make(4)
    tags = [b"%d" % n for n in range(12)]
    sent = [a.engine.offer(b.name, Shipment(blocks=blocks, num_tokens=64, tag=tag)) for tag in tags]
    for one in sent:
        one.result(30)
    for tag in tags:
        b.engine.receive(tag, 30).close()
    assert Communicator.live <= 2 * 2, "two lanes, two ends"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("rank", [0, 1], ids=["sender", "receiver"])
def test_an_operation_that_fails_fails_the_transfer_and_not_the_next(make_world: MakeWorld, rank: int) -> None:
    a, b = make_world("nccl").pair(layout=LARGE, connect_timeout_s=5.0)
    blocks = a.store.make(8)
    Communicator.fails.add(rank)
    with pytest.raises(TransferFailed, match="blocks 0 to 7"):
        a.engine.offer(b.name, Shipment(blocks=blocks, num_tokens=128, tag=b"x")).result(30)
    with pytest.raises(TransferFailed):
        b.engine.receive(b"x", 30)
    assert b.store.in_use() == 0
    assert arrives(a, b, blocks, b"y")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("rank", [0, 1], ids=["sender", "receiver"])
def test_an_operation_that_never_ends_is_given_up(
    make_world: MakeWorld, hold: Callable[[int], threading.Event], rank: int
) -> None:
    a, b = make_world("nccl").pair(layout=LARGE, stall_s=2.0)
    blocks = a.store.make(8)
    hold(rank)
    with pytest.raises(TransferFailed):
        a.engine.offer(b.name, Shipment(blocks=blocks, num_tokens=128, tag=b"x")).result(30)
    hold(rank).set()
    until(lambda: b.store.in_use() == 0, "what was placed is free")
    assert arrives(a, b, blocks, b"y")


@pytest.mark.usefixtures("gpu")
def test_after_a_cancel_not_one_byte_is_written(make_world: MakeWorld, hold: Callable[[int], threading.Event]) -> None:
    a, b = make_world("nccl").pair(layout=LARGE)
    before = [view.copy() for view in b.store.bytes]
    gate = hold(1)
    sent = a.engine.offer(b.name, Shipment(blocks=a.store.make(8, 1), num_tokens=128, tag=b"x"))
    until(lambda: Communicator.live == 2, "a lane is there")
    assert sent.cancel()
    until(lambda: b.store.in_use() == 0, "what was placed is free")
    gate.set()
    assert all(np.array_equal(one, other) for one, other in zip(before, b.store.bytes, strict=True))


@pytest.mark.usefixtures("gpu", "small_chunks")
def test_a_lease_that_ends_between_chunks_stops_the_pull(
    make_world: MakeWorld, hold: Callable[[int], threading.Event]
) -> None:
    a, b = make_world("nccl").pair(layout=LARGE, stall_s=20.0)
    gate = hold(1)
    blocks = a.store.make(8)
    sent = a.engine.offer(b.name, Shipment(blocks=blocks, num_tokens=128, tag=b"x", lease_s=0.5))
    with pytest.raises(TransferFailed):
        sent.result(30)
    a.store.release(blocks)
    again = a.store.make(8, seed=9)  # the same slots hold other bytes
    gate.set()
    with pytest.raises(TransferFailed):
        b.engine.receive(b"x", 30)
    assert b.store.commits == 0
    assert arrives(a, b, again, b"y")


@pytest.mark.usefixtures("gpu")
def test_a_growing_transfer_crosses_layer_by_layer(make_world: MakeWorld) -> None:
    a, b = make_world("nccl").pair(layout=LARGE)
    blocks = a.store.make(4, 5)
    tokens = a.tokens(4)
    a.engine.offer(b.name, Shipment(blocks=blocks, num_tokens=64, tokens=tokens, insert=True, tag=b"g")).result(30)
    with b.engine.receive(b"g", 30) as got:
        assert same_kv(a, blocks, b, got.blocks)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl", None)
    monkeypatch.setitem(sys.modules, "nccl.core", None)
    nccl_lane.load_nccl.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'poolweave\[nccl\]'") as caught:
        nccl_lane.load_nccl()
    assert caught.value.setting == "listen"
    assert TransferConfig(listen="nccl").doors("a")[0].scheme == "nccl"


def test_pools_of_host_memory_cannot_listen_on_it(make_world: MakeWorld) -> None:
    world = make_world("tcp")
    node = world.node()
    with pytest.raises(ConfigError, match="device='cuda:0'"):
        TransferEngine("other", node.store, TransferConfig(listen="nccl"))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("other", ["shm", "inproc", "tcp", "arena"])
def test_pools_on_a_gpu_cannot_listen_on_others(make_world: MakeWorld, other: str) -> None:
    node = make_world("nccl").node()
    with pytest.raises(ConfigError, match="listen on nccl"):
        TransferEngine("other", node.store, TransferConfig(listen=other))
