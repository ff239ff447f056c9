"""C31 and C32 with real processes: what twenty killed nodes had put is forgotten, and who idles stays a member."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("fastapi")

from ref_door import TIMES, World
from ref_waiting import until
from ref_words import save_words

from poolweave.serving.instance.config import InstanceConfig
from poolweave.serving.process.child import Child, Program
from poolweave.types import Role

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(600)]
NODES = 20


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A coordinator and a door of this process, so that their books can be seen; nobody else yet."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "reference"))
    made = World(save_words(tmp_path / "echo"), ())
    yield made
    made.close()


def start(world: World, name: str) -> Child:
    """A node: an instance without a model, in a process of its own."""
    config = InstanceConfig(name=name, role=Role.COLOCATED, registry=world.coordinator.address, membership=TIMES)
    return Child(Program(name, "ref_instance", config))


def epochs(world: World) -> dict[str, int]:
    """Of those who can be sent requests."""
    found = world.client.get("/deployment").json()["instances"]
    return {one["name"]: one["epoch"] for one in found if one["state"] == "active"}


def entries(world: World) -> int:
    """What the door's prompt trees say that somebody holds."""
    holdings = world.door._houses.first.scheduler.holdings
    holdings.sweep()
    return sum(tree.entries for tree in holdings.stats().values())


def put(world: World, life: int) -> None:
    """An answer, after which its instance is known to hold the prompt."""
    answer = world.post(prompt=[50 + life, 60 + life % 7, 70] * 32, max_tokens=3)
    assert answer.status_code == 200, answer.text


def nothing_of_it_is_left(world: World) -> None:
    until(lambda: not world.client.get("/deployment").json()["instances"], "its lease ended")
    until(lambda: not entries(world), "the trees have forgotten it")
    assert not world.coordinator._membership.configuration.members
    world.coordinator._membership.check()


def its_connections_are_closed(at_first: int) -> None:
    """But for what is opened once, with the first of them: fewer than one a node."""
    until(lambda: psutil.Process().num_fds() < at_first + NODES, "its connections are closed")


def test_c31_twenty_lives_of_one_name_each_killed_leave_nothing(world: World) -> None:
    files, seen, name = psutil.Process().num_fds(), set[int](), f"node-{os.getpid()}"
    for life in range(NODES):
        node = start(world, name)
        try:
            node.wait_ready(60)
            until(lambda: name in epochs(world), "it joined")
            seen.add(epochs(world)[name])
            put(world, life)
            assert entries(world) > 0
        finally:
            node.kill()
            node.close()
        nothing_of_it_is_left(world)
    its_connections_are_closed(files)
    assert len(seen) == NODES, "each life had an epoch of its own"


def test_c31_twenty_nodes_killed_at_once_leave_nothing(world: World) -> None:
    files = psutil.Process().num_fds()
    nodes = {f"node-{os.getpid()}-{number}": start(world, f"node-{os.getpid()}-{number}") for number in range(NODES)}
    try:
        for node in nodes.values():
            node.wait_ready(120)
        until(lambda: epochs(world).keys() == nodes.keys(), "all joined")
        for life in range(2 * NODES):
            put(world, life)
        assert entries(world) > 0
    finally:
        for node in nodes.values():
            os.kill(node.pid, 9)
        for node in nodes.values():
            node.close()
    nothing_of_it_is_left(world)
    its_connections_are_closed(files)
    again = start(world, next(iter(nodes)))
    try:
        until(lambda: epochs(world).keys() == {again.name}, "the name is free")
    finally:
        again.close()


def test_c32_an_idle_node_is_a_member_after_five_ttls(world: World) -> None:
    name = f"idle-{os.getpid()}"
    node = start(world, name)
    try:
        until(lambda: name in epochs(world), "it joined")
        epoch, leases = epochs(world)[name], world.coordinator._membership._leases
        until(lambda: leases[name].sequence > 5 * TIMES.ttl_s / TIMES.heartbeat_s, "five TTLs of heartbeats")
        assert epochs(world) == {name: epoch}
        assert world.coordinator._membership.stats().expired == 0
    finally:
        node.close()
