from __future__ import annotations

from itertools import count

from poolweave.scheduler.configuration import Configuration
from poolweave.scheduler.enrolment import Enrolment
from poolweave.scheduler.membership import MembershipConfig
from poolweave.scheduler.membership_messages import Admitted, Heartbeat, Join, Refusal, Refused
from poolweave.types import Role

CONFIG = MembershipConfig(ttl_s=9.0, heartbeat_s=2.0)


def enrolment() -> Enrolment:
    epochs = count(10)
    return Enrolment("a", Role.DECODE, lambda: next(epochs), ("tcp://h:1",), CONFIG)


def admitted(epoch: int = 10, name: str = "a") -> Admitted:
    return Admitted(name=name, epoch=epoch, new=True, configuration=Configuration(coordinator=1, version=1))


def refused(reason: Refusal, epoch: int = 10, retry_after_s: float | None = None) -> Refused:
    return Refused(name="a", epoch=epoch, reason=reason, retry_after_s=retry_after_s)


def test_joins_until_admitted_then_beats() -> None:
    me = enrolment()
    first = me.due(0.0)
    assert first == Join(name="a", epoch=10, role=Role.DECODE, addresses=("tcp://h:1",), sequence=1)
    assert me.due(1.9) is None
    again = me.due(2.0)
    assert isinstance(again, Join)
    assert again.sequence == 2
    assert not me.answered(admitted(), 2.5)
    assert me.due(3.9) is None
    assert me.due(4.0) == Heartbeat(name="a", epoch=10, sequence=3)


def test_unknown_to_a_restarted_coordinator_joins_with_the_same_epoch_at_once() -> None:
    me = enrolment()
    me.due(0.0)
    me.answered(admitted(), 0.1)
    me.due(2.0)
    assert not me.answered(refused(Refusal.UNKNOWN), 2.1)
    again = me.due(2.1)
    assert isinstance(again, Join)
    assert (again.epoch, again.sequence) == (10, 3)


def test_declared_dead_begins_a_new_life() -> None:
    me = enrolment()
    me.due(0.0)
    assert me.answered(refused(Refusal.STALE_EPOCH), 0.1)
    assert not me.answered(refused(Refusal.STALE_EPOCH), 0.2)  # the same, delivered twice
    again = me.due(0.2)
    assert isinstance(again, Join)
    assert (again.epoch, again.sequence) == (11, 1)
    assert not me.answered(admitted(epoch=10), 0.3)  # too late, of the last life
    assert not me.answered(admitted(epoch=11, name="b"), 0.3)
    assert not me.joined


def test_waits_where_it_is_told_to() -> None:
    me = enrolment()
    me.due(0.0)
    me.answered(refused(Refusal.NAME_TAKEN, retry_after_s=3.5), 0.5)
    assert me.next_s == 4.0
    assert me.due(3.9) is None
    assert isinstance(me.due(4.0), Join)


def test_clock_set_back_does_not_silence_it() -> None:
    me = enrolment()
    me.due(1000.0)
    assert me.due(1001.0) is None
    assert me.due(5.0) is not None
    assert me.due(6.0) is None
    assert me.due(7.0) is not None
