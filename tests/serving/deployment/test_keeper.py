"""Keepers and spares while the machine has no room for another process."""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
from ref_waiting import until

from poolweave.serving.deployment import keeper as keepers
from poolweave.serving.deployment import spares as waiting
from poolweave.serving.deployment.keeper import Keeper, Upkeep
from poolweave.serving.deployment.spares import Spares
from poolweave.serving.membership.coordinator import CoordinatorConfig
from poolweave.serving.process.child import Child, Program

PROGRAM = Program("coordinator", "poolweave.serving.membership.coordinator", CoordinatorConfig())
UPKEEP = Upkeep(60.0, 0.01, 60.0)


class Full:
    """Stands in for Child; refuses while `failures` last."""

    def __init__(self, failures: int) -> None:
        self.left = failures
        self.refused = 0

    def __call__(self, *arguments: Any, **settings: Any) -> Child:
        if self.left:
            self.left -= 1
            self.refused += 1
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return Child(*arguments, **settings)


def test_spares_that_cannot_be_started_harm_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Full(100)
    monkeypatch.setattr(waiting, "Child", full)
    spares = Spares(PROGRAM, 2, 60.0)
    with spares.starting():
        pass
    spares.look_after()
    assert full.refused == 1, "it is not tried again at once"
    assert spares.take(PROGRAM) is None
    spares.close()


def test_a_first_start_without_room_is_told() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keepers, "Child", Full(1))
        keeper = Keeper(PROGRAM, UPKEEP)
        with pytest.raises(BlockingIOError):
            keeper.wait_ready()
        keeper.close()


@pytest.mark.multiproc
def test_who_dies_while_there_is_no_room_comes_back_once_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper(PROGRAM, UPKEEP)
    keeper.wait_ready()
    pid, full = keeper.pid, Full(2)
    assert pid is not None
    monkeypatch.setattr(keepers, "Child", full)
    os.kill(pid, signal.SIGKILL)
    until(lambda: keeper.pid not in (None, pid), "it is back")
    assert full.refused == 2
    keeper.close()


@pytest.mark.multiproc
def test_a_service_outlives_whoever_read_what_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["one", "two"]
    told: list[str] = []

    def hear(name: str, line: str) -> None:
        told.append(line)
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    keeper = Keeper(PROGRAM, replace(UPKEEP, hear=hear))
    keeper.wait_ready()
    pid = keeper.pid
    monkeypatch.setattr(Child, "new_lines", lambda child: [lines.pop()] if lines else [])
    until(lambda: len(told) == 2, "both were told")
    assert (keeper.pid, keeper.restarts) == (pid, 0)
    keeper.close()


@pytest.mark.multiproc
def test_what_nobody_expected_of_a_life_does_not_end_its_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper(PROGRAM, UPKEEP)
    keeper.wait_ready()
    pid, words = keeper.pid, ["nonsense"]

    def new_lines(child: Child) -> list[str]:
        if words:
            raise ValueError(words.pop())
        return []

    monkeypatch.setattr(Child, "new_lines", new_lines)
    until(lambda: keeper.pid not in (None, pid), "it lives again")
    assert keeper.restarts == 1
    keeper.close()
