"""Two hosts, as two network namespaces joined by a virtual cable: needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from ref_transfer_peer import LARGE, PeerProcess
from ref_transfer_world import Node, World

from poolweave.errors import TransferFailed
from poolweave.transfer import Shipment

pytestmark = pytest.mark.multiproc


@dataclass(frozen=True)
class Cable:
    """From this namespace (`here`) to the other (`there`, an address in the namespace `name`)."""

    name: str
    here: str
    there: str


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0


@pytest.fixture
def cable() -> Iterator[Cable]:
    name, octet = f"pw{os.getpid() % 100000}", os.getpid() % 250
    one = Cable(name, f"10.231.{octet}.1", f"10.231.{octet}.2")
    if shutil.which("ip") is None or not ip("netns", "add", name):
        pytest.skip("network namespaces need root and iproute2")
    try:
        made = (
            ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b")
            and ip("link", "set", f"{name}b", "netns", name)
            and ip("addr", "add", f"{one.here}/24", "dev", f"{name}a")
            and ip("link", "set", f"{name}a", "up")
            and ip("netns", "exec", name, "ip", "addr", "add", f"{one.there}/24", "dev", f"{name}b")
            and ip("netns", "exec", name, "ip", "link", "set", f"{name}b", "up")
        )
        if not made:
            pytest.skip("this kernel has no virtual cables")
        yield one
    finally:
        ip("link", "del", f"{name}a")
        ip("netns", "del", name)


def total(node: Node, blocks: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> int:
    return int(sum(node.store.view(one).astype(np.int64).sum() for one in blocks.tolist()))


def test_transfers_between_hosts_and_a_cable_that_is_pulled(cable: Cable) -> None:
    """Both listen on all addresses; each tells the other the one by which it was reached."""
    world = World("tcp")
    here = world.node(layout=LARGE, num_slots=64, listen="tcp://0.0.0.0:0", stall_s=1.0)
    port = here.engine.address.rpartition(":")[2]
    parent = {"name": here.name, "address": f"tcp://{cable.here}:{port}"}
    peer = PeerProcess(
        prefix=["ip", "netns", "exec", cable.name], name="far", parent=parent, listen="tcp://0.0.0.0:0", stall_s=1.0
    )
    try:
        here.engine.connect("far", f"tcp://{cable.there}:{peer.address.rpartition(':')[2]}")
        shipment = here.shipment(8, tag=b"out")
        here.engine.offer("far", shipment).result(20)
        assert peer.ask("receive", tag="out")["sum"] == total(here, shipment.blocks)
        wanted = peer.ask("offer", n=8, tag="back", seed=5)["sum"]
        with here.engine.receive(b"back", 20) as got:
            assert total(here, got.blocks) == wanted
        ip("link", "set", f"{cable.name}a", "down")
        with pytest.raises(TransferFailed):  # nobody says goodbye: the lease ends it
            here.engine.offer("far", Shipment(blocks=shipment.blocks, num_tokens=128, tag=b"cut", lease_s=2.0)).result(
                60
            )
        assert sum(here.store.loans.values()) == 0
    finally:
        peer.kill()
        world.close()
