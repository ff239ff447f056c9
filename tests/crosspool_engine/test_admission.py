"""The waiting queue: bounded, by deadline, in turn among models."""

from __future__ import annotations

import pytest

from poolweave.crosspool_engine.admission import Admission
from poolweave.crosspool_engine.request import DecodeRequest
from poolweave.errors import Overloaded


def request(name: str, model: str = "m") -> DecodeRequest:
    return DecodeRequest(request_id=name, model=model, tokens=[1])


def admit(admission: Admission, room: dict[str, int]) -> list[str]:
    """Admit while `room` (requests a model) lasts."""
    entered: list[str] = []

    def enter(candidate: DecodeRequest) -> bool:
        if room[candidate.model] == 0:
            return False
        room[candidate.model] -= 1
        entered.append(candidate.request_id)
        return True

    admission.admit(enter)
    return entered


def test_models_take_turns_and_within_one_nobody_overtakes() -> None:
    admission = Admission(10, 5.0)
    for name in ("a1", "a2", "a3", "b1"):
        admission.add(request(name, name[0]), 0.0)
    assert admit(admission, {"a": 2, "b": 9}) == ["a1", "b1", "a2"]
    assert len(admission) == 1
    assert admission.count("a") == 1


def test_a_model_without_room_holds_up_no_other() -> None:
    admission = Admission(10, 5.0)
    for name in ("a1", "b1", "b2"):
        admission.add(request(name, name[0]), 0.0)
    assert admit(admission, {"a": 0, "b": 9}) == ["b1", "b2"]
    assert admission.holds("a1")


def test_bounded_and_by_deadline() -> None:
    admission = Admission(2, 5.0)
    admission.add(request("one"), 0.0)
    admission.add(request("two"), 3.0)
    with pytest.raises(Overloaded, match="2 requests wait already") as caught:
        admission.add(request("three"), 3.0)
    assert (caught.value.waiting, caught.value.limit) == (2, 2)
    assert admission.expire(4.9) == []
    assert [late.request_id for late in admission.expire(5.0)] == ["one"]
    assert [late.request_id for late in admission.expire(99.0)] == ["two"]
    assert len(admission) == 0


def test_taking_out_one_and_all_of_a_model() -> None:
    admission = Admission(10, 5.0)
    for name in ("a1", "a2", "b1"):
        admission.add(request(name, name[0]), 0.0)
    taken = admission.remove("a2")
    assert taken is not None
    assert admission.remove("a2") is None
    assert [each.request_id for each in admission.drain("a")] == ["a1"]
    assert admission.drain("a") == []
    assert len(admission) == 1


def test_no_one_may_wait_where_max_waiting_is_zero() -> None:
    with pytest.raises(Overloaded):
        Admission(0, 5.0).add(request("one"), 0.0)
