from __future__ import annotations

import pytest

from poolweave.errors import ConfigError, UnknownPeer
from poolweave.scheduler import slots as slots_module
from poolweave.scheduler.slots import Slots


def test_lowest_free_slot_is_given_again() -> None:
    slots = Slots()
    assert [slots.add(name) for name in "abcd"] == [0, 1, 2, 3]
    assert slots.add("b") == 1
    assert [slots.remove("c"), slots.remove("a"), slots.remove("a")] == [2, 0, None]
    assert "a" not in slots
    assert list(slots.names) == [None, "b", None, "d"]
    assert [slots.add("e"), slots.add("f"), slots.add("g")] == [0, 2, 4]
    assert (len(slots), slots.capacity, sorted(slots)) == (5, 5, ["b", "d", "e", "f", "g"])


def test_unknown_names_and_slots() -> None:
    slots = Slots()
    slots.add("a")
    slots.remove("a")
    assert slots.get("a") is None
    with pytest.raises(UnknownPeer) as error:
        slots.slot("a")
    assert error.value.peer == "a"
    for wrong in (-1, 0, 7):
        with pytest.raises(UnknownPeer, match=f"slot {wrong} of 1"):
            slots.name(wrong)


def test_too_many_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "MAX_INSTANCES", 2)
    slots = Slots()
    slots.add("a")
    slots.add("b")
    with pytest.raises(ConfigError) as error:
        slots.add("c")
    assert error.value.limit == 2
    slots.remove("a")
    assert slots.add("c") == 0
