"""Many peers come and go, each another instance: nothing of them stays in the one they met."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
from ref_transfer_peer import usage
from ref_transfer_world import Node, World
from ref_waiting import until

MakeWorld = Callable[[str], World]
LEASE_S = 600.0  # no machine is so busy that an arrival goes before it is claimed


def visit(world: World, hub: Node) -> None:
    """A new instance sends to the hub, receives from it and leaves."""
    guest = world.node(num_slots=4, lease_s=LEASE_S)
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
    hub = world.node(num_slots=8, lease_s=LEASE_S)
    for _ in range(warm):  # pools of workers and connections are warm then
        visit(world, hub)
    gc.collect()
    before, resident = usage(), []
    for i in range(visits):
        visit(world, hub)
        if i % (visits // 10) == 0:
            gc.collect()
            resident.append(usage()["resident"])
    until(lambda: hub.engine.stats().receiving.sessions == 0)
    until(lambda: is_back(before))
    growth = np.polyfit(np.arange(len(resident)), resident, 1)[0] * len(resident)  # a leak is a slope, not a step
    assert growth <= 8 << 20, f"memory grows with the visits: {resident}"
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
    until(lambda: hub.engine.stats().receiving.sessions == len(guests) // 2)
    for guest in guests[1::2]:
        guest.engine.offer(hub.name, guest.shipment(1)).result(60)
