"""Real SIGKILLs between the steps of growing transfers: before the first layer, between layers, with all but the last.

The other side lives: what it lent or placed comes back, and the dead one's next life is served.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from ref_transfer_peer import LARGE, PeerProcess
from ref_transfer_world import Node, World
from ref_waiting import until

from poolweave.errors import PoolweaveError, TransferFailed
from poolweave.transfer import Shipment

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]
STEPS = [2, *(pytest.param(layers, marks=pytest.mark.slow) for layers in (0, 1, 3))]
BLOCKS = 8


@pytest.fixture(params=["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def survivor(request: pytest.FixtureRequest) -> Iterator[Node]:
    """This process: the one that lives."""
    world = World(request.param)
    node = world.node(layout=LARGE, num_slots=64, lease_s=600.0)
    yield node
    world.close()
    assert node.store.in_use() == 0


def start(survivor: Node) -> tuple[str, PeerProcess]:
    name, listen = f"peer-of-{survivor.name}", survivor.engine.address.partition(":")[0]
    parent = {"name": survivor.name, "address": survivor.engine.address}
    peer = PeerProcess(name=name, parent=parent, listen=listen, lease_s=600.0)
    survivor.engine.connect(name, peer.address)
    return name, peer


def total(node: Node, blocks: np.ndarray) -> int:  # type: ignore[type-arg]
    return int(sum(node.store.view(one).astype(np.int64).sum() for one in blocks.tolist()))


def receive_whole(survivor: Node, tag: str) -> None:
    """A sender's next life grows an offer to its end."""
    _, peer = start(survivor)
    wanted = peer.ask("grow", n=BLOCKS, tag=tag, layers=LARGE.num_layers, seed=7)["sum"]
    with survivor.engine.receive(tag.encode(), 60) as got:
        assert total(survivor, got.blocks) == wanted
    peer.quit()


@pytest.mark.parametrize("layers", STEPS)
def test_a_sender_dies_between_layers(survivor: Node, layers: int) -> None:
    _, peer = start(survivor)
    peer.ask("grow", n=BLOCKS, tag="doomed", layers=layers)
    arriving = survivor.engine.follow(b"doomed", 60)
    if layers:
        arriving.wait(layers, timeout=60)
    peer.kill()
    with pytest.raises(PoolweaveError):
        arriving.wait(LARGE.num_layers, timeout=60)
    with pytest.raises(TransferFailed):
        survivor.engine.receive(b"doomed", 60)
    until(lambda: survivor.store.in_use() == 0)
    survivor.engine.check()
    receive_whole(survivor, "next")


@pytest.mark.parametrize("layers", STEPS)
def test_a_receiver_dies_between_layers(survivor: Node, layers: int) -> None:
    name, peer = start(survivor)
    blocks = survivor.store.alloc(BLOCKS)
    survivor.store.fill(blocks, 3)
    shipment = Shipment(blocks=blocks, num_tokens=16 * BLOCKS, tag=b"doomed", growing=True)
    sent = survivor.engine.offer(name, shipment)
    if layers:
        survivor.store.seal(blocks, layers)
        sent.ready(layers)
        until(lambda: sent.progress >= layers / LARGE.num_layers)
    else:
        until(lambda: survivor.engine.stats().sending.open_offers == 1)
    peer.kill()
    with pytest.raises(TransferFailed):
        sent.result(60)
    assert sum(survivor.store.loans.values()) == 0
    sent.ready(layers)  # nothing happens any more
    survivor.store.seal(blocks, LARGE.num_layers)
    name, peer = start(survivor)
    again = survivor.engine.offer(name, Shipment(blocks=blocks, num_tokens=16 * BLOCKS, tag=b"next"))
    assert again.result(60).pulled_blocks == BLOCKS
    assert peer.ask("receive", tag="next")["sum"] == total(survivor, blocks)
    survivor.store.release(blocks)
    peer.quit()
