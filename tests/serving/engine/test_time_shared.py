"""Engines that take turns: one step is one model's, and each that has work gets its turn."""

from __future__ import annotations

import pytest

from poolweave.errors import RequestRefused
from poolweave.serving.engine.sequence import Emitted, Sequence
from poolweave.serving.engine.time_shared import TimeShared


class Engine:
    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.stalled = False

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    def add(self, sequence: Sequence) -> None:
        self.left[sequence.request_id] = 3

    def cancel(self, request_id: str) -> bool:
        return self.left.pop(request_id, None) is not None

    def step(self) -> list[Emitted]:
        told = []
        for name in list(self.left):
            self.left[name] -= 1
            told.append(Emitted(name, 1, None if self.left[name] else "length"))
            if not self.left[name]:
                del self.left[name]
        return told


def test_models_with_work_take_turns_and_switches_are_counted() -> None:
    shared = TimeShared({"a": Engine(), "b": Engine(), "c": Engine()})
    for name, model in (("1", "a"), ("2", "b")):
        shared.add(Sequence(request_id=name, tokens=[1], model=model))
    order = []
    while shared.has_work:
        order += [emitted.request_id for emitted in shared.step()]
    assert order == ["1", "2", "1", "2", "1", "2"]
    assert shared.switches == 5
    assert shared.step() == []


def test_it_stalls_when_all_that_have_work_do_and_unknown_models_are_refused() -> None:
    engines = {"a": Engine(), "b": Engine()}
    shared = TimeShared(engines)
    shared.add(Sequence(request_id="1", tokens=[1], model="a"))
    engines["a"].stalled = True
    assert shared.stalled
    shared.add(Sequence(request_id="2", tokens=[1], model="b"))
    assert not shared.stalled
    assert shared.cancel("2")
    assert not shared.cancel("2")
    with pytest.raises(RequestRefused, match="no model 'c' is here: a, b"):
        shared.add(Sequence(request_id="3", tokens=[1], model="c"))
