"""Many peers come and go, each another instance: nothing of them stays in the one they met."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
from ref_transfer_peer import usage
from ref_transfer_world import Node, World

MakeWorld = Callable[[str], World]


def wait_until(condition: Callable[[], bool]) -> None:
    """For at most 60 s, until other threads have made it true."""
    waiting = threading.Event()
    for _ in range(6000):
        if condition():
            return
        waiting.wait(0.01)
    pytest.fail("it never came true")


def visit(world: World, hub: Node) -> None:
    """A new instance sends to the hub, receives from it and leaves."""
    guest = world.node(num_slots=4)
    guest.engine.connect(hub.name, hub.engine.address)
    hub.engine.connect(guest.name, guest.engine.address)
    guest.engine.offer(hub.name, guest.shipment(1, tag=b"in")).result(60)
    hub.engine.receive(b"in", 60).close()
    shipment = hub.shipment(1, tag=b"out")
    hub.engine.offer(guest.name, shipment).result(60)
    guest.engine.receive(b"out", 60).close()
    hub.store.release(shipment.blocks)
    world.nodes.remove(guest)
    guest.engine.close()
    guest.store.close()
    hub.engine.disconnect(guest.name)


def is_back(before: dict[str, int]) -> bool:
    gc.collect()  # closed engines are in cycles, and their mappings go with them
    now = usage()
    return now["fds"] <= before["fds"] and now["threads"] <= before["threads"]


def crowd(world: World, visits: int, warm: int) -> None:
    hub = world.node(num_slots=8)
    for _ in range(warm):  # pools of workers and connections are warm then
        visit(world, hub)
    gc.collect()
    before = usage()
    for _ in range(visits):
        visit(world, hub)
    wait_until(lambda: hub.engine.stats().receiving.sessions == 0)
    wait_until(lambda: is_back(before))
    assert usage()["resident"] <= before["resident"] + (8 << 20)
    assert hub.engine.stats().sending.transports == {}
    assert hub.store.in_use() == 0


@pytest.mark.parametrize("listen", ["shm", "tcp"])
def test_a_hundred_peers_leave_nothing(make_world: MakeWorld, listen: str) -> None:
    crowd(make_world(listen), 100, 10)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("listen", ["shm", "tcp"])
def test_a_thousand_peers_leave_nothing(make_world: MakeWorld, listen: str) -> None:
    crowd(make_world(listen), 1000, 200)


def test_a_hundred_peers_at_once(make_world: MakeWorld) -> None:
    """All are connected at the same time, and one that leaves disturbs no other."""
    world = make_world("shm")
    hub = world.node(num_slots=8)
    guests = [world.node(num_slots=2) for _ in range(100)]
    for i, guest in enumerate(guests):
        guest.engine.connect(hub.name, hub.engine.address)
        guest.engine.offer(hub.name, guest.shipment(1, tag=b"%d" % i)).result(60)
        hub.engine.receive(b"%d" % i, 60).close()
    assert hub.engine.stats().receiving.sessions == len(guests)
    for guest in guests[::2]:
        guest.engine.disconnect(hub.name)
    wait_until(lambda: hub.engine.stats().receiving.sessions == len(guests) // 2)
    for guest in guests[1::2]:
        guest.engine.offer(hub.name, guest.shipment(1)).result(60)
