from __future__ import annotations

import pytest

from poolweave.errors import ConfigError, UnknownPeer
from poolweave.scheduler.fleet import Fleet
from poolweave.scheduler.slots import Slots
from poolweave.types import Role


def fleet(count: int = 3) -> Fleet:
    made = Fleet(Slots())
    for i in range(count):
        made.add(f"i{i}", Role.PREFILL if i % 2 else Role.DECODE)
    return made


def test_groups_follow_roles_and_acceptance() -> None:
    made = fleet(40)
    assert made.of(Role.DECODE).tolist() == list(range(0, 40, 2))
    assert made.of(Role.PREFILL, Role.DECODE).tolist() == list(range(40))
    made.accept("i3", False)
    made.remove("i5")
    assert made.of(Role.PREFILL).tolist()[:3] == [1, 7, 9]
    made.accept("i3", True)
    assert made.add("new", Role.PREFILL) == 5
    assert made.of(Role.PREFILL).tolist()[:4] == [1, 3, 5, 7]
    assert made.of(Role.COLOCATED).size == 0


def test_queue_is_exactly_empty_after_the_last() -> None:
    made = fleet()
    for seconds in (0.1, 0.2, 0.3):
        made.enqueue(1, seconds)
    for seconds in (0.1, 0.2, 0.3):
        made.dequeue(1, seconds)
    assert made.candidates(made.of(Role.PREFILL)).queued_s.tolist() == [0.0]
    made.check()


def test_reports_add_what_others_sent() -> None:
    made = fleet()
    made.enqueue(1, 0.5)
    made.report("i1", 0.7)
    assert made.loads()[1].queued_s == pytest.approx(0.7)
    made.report("i1", 0.3)  # older than our last request
    assert made.loads()[1].queued_s == pytest.approx(0.5)
    with pytest.raises(UnknownPeer):
        made.report("nobody", 1.0)


def test_new_instance_on_an_old_slot_is_idle() -> None:
    made = fleet()
    made.enqueue(0, 1.0)
    made.begin_decode(0, 100)
    made.report("i0", 9.0)
    made.credit[0] = 0.1
    made.remove("i0")
    assert made.remove("i0") is None
    made.add("new", Role.PREFILL)
    assert made.uniform
    made.describe("new", slowness=2.0, kv_capacity_tokens=5)
    assert not made.uniform
    load = made.loads()[0]
    assert (load.name, load.queued_s, load.num_prefills, load.num_sequences, load.kv_tokens) == ("new", 0.0, 0, 0, 0)
    assert (made.credit[0], made.slowness[0], made.kv_capacity[0]) == (1.0, 2.0, 5)


def test_refusals() -> None:
    made = fleet()
    with pytest.raises(ConfigError, match="known already"):
        made.add("i0", Role.PREFILL)
    with pytest.raises(ConfigError, match="slowness"):
        made.describe("i1", slowness=0.0)
    with pytest.raises(UnknownPeer):
        made.accept("nobody", True)
