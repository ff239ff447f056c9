"""Real processes and real SIGKILLs in the middle of transfers: C20, C21. The other side lives and loses nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ref_transfer_peer import LARGE, PeerProcess, usage
from ref_transfer_world import Node, World, require_nixl
from ref_waiting import until

from poolweave.errors import PeerLost, StaleEpoch, TransferFailed
from poolweave.transfer import Shipment
from poolweave.transfer.transports.nixl import NixlSource
from poolweave.transfer.transports.shm import MappedSource
from poolweave.transfer.transports.tcp import TcpSource

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(180)]
CYCLES = [6, pytest.param(20, marks=pytest.mark.slow)]  # of which half kill the receiver and half the sender
WARM = 3


def leftovers() -> set[str]:
    """What this package has left on file systems: others write there too."""
    return {f"{folder}/{one}" for folder in ("/dev/shm", "/tmp") for one in os.listdir(folder) if "poolweave" in one}


def total(node: Node, blocks: Any) -> int:
    return int(sum(node.store.view(one).astype(np.int64).sum() for one in blocks.tolist()))


@pytest.fixture(params=["shm", "nixl", "tcp"])
def survivor(request: pytest.FixtureRequest) -> Iterator[Node]:
    """This process: the one that lives."""
    if request.param == "nixl":
        require_nixl()
    world = World(request.param)
    yield world.node(layout=LARGE, num_slots=64, stall_s=5.0)
    world.close()


def start(survivor: Node, address: str | None = None) -> PeerProcess:
    listen = address or survivor.engine.address.partition(":")[0]
    parent = {"name": survivor.name, "address": survivor.engine.address}
    peer = PeerProcess(name=f"peer-of-{survivor.name}", parent=parent, listen=listen)
    survivor.engine.connect(f"peer-of-{survivor.name}", peer.address)
    return peer


def exchange_both_ways(survivor: Node, peer: PeerProcess, tag: str) -> None:
    """A whole transfer each way, bytes compared by their sum."""
    blocks = survivor.store.make(4, seed=len(tag))
    survivor.engine.offer(f"peer-of-{survivor.name}", Shipment(blocks=blocks, num_tokens=64, tag=tag.encode())).result(
        20
    )
    assert peer.ask("receive", tag=tag)["sum"] == total(survivor, blocks)
    survivor.store.release(blocks)
    wanted = peer.ask("offer", n=4, tag=f"{tag}-back", seed=3)["sum"]
    with survivor.engine.receive(f"{tag}-back".encode(), 20) as got:
        assert total(survivor, got.blocks) == wanted


class Gate:
    """Once `held`, pulls of this process stop at their first byte: `reached` tells, `go_on` frees them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held, self.reached, self.go_on = threading.Event(), threading.Event(), threading.Event()
        for kind in (MappedSource, NixlSource, TcpSource):
            monkeypatch.setattr(kind, "pull", self._gated(kind.pull))

    def _gated(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def pull(source: Any, slice_: Any) -> Any:
            if self.held.is_set():
                self.reached.set()
                assert self.go_on.wait(30)
            return original(source, slice_)

        return pull

    def reset(self) -> None:
        for event in (self.held, self.reached, self.go_on):
            event.clear()


def kill_the_receiver(survivor: Node, peer: PeerProcess) -> None:
    peer.ask("hold")
    blocks = survivor.store.make(16)
    sent = survivor.engine.offer(f"peer-of-{survivor.name}", Shipment(blocks=blocks, num_tokens=256, tag=b"doomed"))
    assert peer.read() == {"event": "pulling"}
    peer.kill()
    with pytest.raises(PeerLost):
        sent.result(20)
    assert sum(survivor.store.loans.values()) == 0
    survivor.store.release(blocks)


def kill_the_sender(survivor: Node, peer: PeerProcess, gate: Gate) -> None:
    gate.held.set()
    peer.ask("offer", n=16, tag="doomed")
    assert gate.reached.wait(20)
    peer.kill()
    until(lambda: survivor.engine.stats().receiving.sessions == 0)  # the loss was seen
    gate.go_on.set()
    with pytest.raises(TransferFailed):
        survivor.engine.receive(b"doomed", 20)
    gate.reset()


@pytest.mark.parametrize("cycles", CYCLES)
def test_sigkill_in_the_middle_of_transfers(survivor: Node, monkeypatch: pytest.MonkeyPatch, cycles: int) -> None:
    """The peer dies receiving, then sending, and so on; it starts again at the same address each time."""
    before, gate = leftovers(), Gate(monkeypatch)
    warm: dict[str, int] = {}
    address = None
    for cycle in range(cycles):
        peer = start(survivor, address)
        address = None if peer.address.startswith("shm") else peer.address
        exchange_both_ways(survivor, peer, f"{cycle}")
        if cycle % 2:
            kill_the_sender(survivor, peer, gate)
        else:
            kill_the_receiver(survivor, peer)
        assert survivor.store.in_use() == 0
        survivor.engine.check()
        until(lambda: survivor.engine.stats().receiving.sessions == 0)
        if cycle == WARM:  # pools of workers and connections are as large as they get
            warm = usage()
    come_back_to(warm)
    assert leftovers() == before


def come_back_to(first: dict[str, int]) -> None:
    """Threads and descriptors return to what they were, or nearly: a dead peer's sockets may still be closing, so this
    waits; what leaked stays.
    """

    def is_back() -> bool:
        now = usage()
        return all(now[what] <= first[what] + 1 for what in ("threads", "fds"))

    until(is_back, f"threads and descriptors as they were: {first}")


def test_a_reservation_of_an_earlier_life_is_stale(survivor: Node) -> None:
    peer = start(survivor)
    name = f"peer-of-{survivor.name}"
    dst = survivor.engine.reserve(name, 2)
    address = None if peer.address.startswith("shm") else peer.address
    peer.kill()
    peer = start(survivor, address)
    shipment = survivor.shipment(2, tag=b"s", dst=dst, on_demand=None)
    with pytest.raises((StaleEpoch, PeerLost)):
        survivor.engine.offer(name, shipment).result(20)
    exchange_both_ways(survivor, peer, "x")
    with pytest.raises(StaleEpoch):  # now the new life is known
        survivor.engine.offer(name, survivor.shipment(2, tag=b"t", dst=dst, on_demand=None))
    peer.quit()


@pytest.mark.slow
def test_connecting_and_leaving_again_and_again_leaves_nothing(survivor: Node) -> None:
    """500 times over each transport: memory, threads and descriptors stay flat."""
    peer = start(survivor)
    name = f"peer-of-{survivor.name}"
    blocks = survivor.store.make(1)
    figures = []
    for cycle in range(500):
        survivor.engine.offer(name, Shipment(blocks=blocks, num_tokens=16)).result(20)
        survivor.engine.disconnect(name)
        survivor.engine.connect(name, peer.address)
        if cycle % 50 == 0:
            figures.append(usage())
    come_back_to(figures[2])
    resident = [figure["resident"] for figure in figures[2:]]
    assert resident[-1] <= resident[0] + (4 << 20), f"memory grows: {resident}"
    until(lambda: peer.ask("stats")["fds"] <= 40)
    peer.quit()
