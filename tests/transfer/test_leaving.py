"""What is dropped, late or unanswerable gives everything back: reservations, arrivals, dials."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from ref_transfer_world import World

from poolweave.errors import ConfigError, TransferFailed, TransferTimeout

MakeWorld = Callable[[str], World]


@pytest.mark.parametrize("num_blocks", [0, -1, 10**7])
def test_a_reservation_of_an_impossible_size_is_refused_by_name(make_world: MakeWorld, num_blocks: int) -> None:
    a, b = make_world("shm").pair()
    with pytest.raises(ConfigError) as caught:
        a.engine.reserve(b.name, num_blocks)
    assert (caught.value.setting, caught.value.value) == ("num_blocks", num_blocks)


def test_a_reservation_that_comes_too_late_is_given_back(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_world("shm").pair()
    go_on, place = threading.Event(), b.store.place

    def slow(incoming: Any) -> Any:
        assert go_on.wait(60)
        return place(incoming)

    monkeypatch.setattr(b.store, "place", slow)
    with pytest.raises(TransferTimeout):
        a.engine.reserve(b.name, 3, timeout=0.01)
    go_on.set()
    for _ in range(2):  # their answers come after the late one's, and the second question after its return
        a.engine.reserve(b.name, 1, timeout=60)
    assert b.engine.stats().receiving.reserved == 2


def test_an_arrival_that_is_dropped_warns_and_goes_back(world: World) -> None:
    a, b = world.pair()
    a.engine.offer(b.name, a.shipment(2, tag=b"t")).result(60)
    held = [b.engine.receive(b"t", 60)]
    with pytest.warns(ResourceWarning, match="arrival of 2 blocks was not closed: .* are released now"):
        held.clear()
    waiting = threading.Event()
    for _ in range(6000):
        if not b.store.in_use():
            break
        waiting.wait(0.01)
    assert b.store.in_use() == 0


def test_a_listener_that_takes_no_connection_is_given_up(make_world: MakeWorld) -> None:
    """Its backlog is full and nobody accepts: a dial is tried again, but not for ever."""
    a = make_world("shm").node(connect_timeout_s=0.2)
    address = f"\0poolweave/transfer/full-{a.name}"
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket(socket.AF_UNIX))
        full.bind(address)
        full.listen(0)
        codes = [0]
        while codes[-1] == 0:
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            codes.append(one.connect_ex(address))
        assert codes[-1] == errno.EAGAIN
        a.engine.connect("full", f"shm://full-{a.name}")
        with pytest.raises(TransferFailed, match="cannot be reached") as caught:
            a.engine.offer("full", a.shipment(1)).result(60)
    assert caught.value.reason == "connect"
