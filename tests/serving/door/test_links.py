"""What runs beside requests goes on when something in it breaks: links, the looks at pools, the hearing of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ref_door import World
from ref_waiting import until

from poolweave.types import Role


class Breaks:
    """In place of `call`: fails `times` times, with what nobody expects."""

    def __init__(self, call: Callable[..., Any], times: int = 1) -> None:
        self._call = call
        self.left = times
        self.after = 0

    def __call__(self, *arguments: Any) -> Any:
        if self.left:
            self.left -= 1
            raise KeyError("gone")
        self.after += 1
        return self._call(*arguments)


def test_a_member_that_could_not_be_taken_in_is_called_again(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(Role.COLOCATED)
    listener = world.door._houses.first.listener
    monkeypatch.setattr(listener, "connect", Breaks(listener.connect, 2))
    world.add("colocated-1", Role.COLOCATED)
    until(lambda: world.usable == 2, "it is linked all the same")
    assert caplog.text.count("colocated-1 could not be taken in; it is called again") == 2
    world.door._houses.first.scheduler.check()


def test_pools_are_looked_at_after_a_look_that_broke(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(Role.COLOCATED)
    holdings = world.door._houses.first.scheduler.holdings
    sweep = Breaks(holdings.sweep)
    monkeypatch.setattr(holdings, "sweep", sweep)
    until(lambda: sweep.after, "the next look")


def test_events_are_heard_after_a_poll_that_broke(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(Role.COLOCATED)
    subscriber = world.door._houses.first.listener._subscriber
    poll = Breaks(subscriber.poll)
    monkeypatch.setattr(subscriber, "poll", poll)
    until(lambda: poll.after, "the next poll")
