from __future__ import annotations

from poolweave.scheduler.configuration import Configuration, Difference, Member, Roster
from poolweave.types import Role


def member(name: str, epoch: int = 1, *, draining: bool = False) -> Member:
    return Member(name=name, epoch=epoch, role=Role.DECODE, draining=draining)


def told(version: int, *members: Member, coordinator: int = 1, complete: bool = True) -> Configuration:
    return Configuration(coordinator=coordinator, version=version, members=members, complete=complete)


def test_differences() -> None:
    roster = Roster()
    a, b = member("a"), member("b")
    assert roster.apply(told(1, a, b)) == Difference(joined=(a, b))
    reborn, leaving = member("a", epoch=2), member("b", draining=True)
    assert roster.apply(told(2, reborn, leaving)) == Difference(gone=(a,), joined=(reborn,), changed=(leaving,))
    assert roster.apply(told(3, reborn)) == Difference(gone=(leaving,))
    assert not roster.apply(told(4, reborn))
    assert roster.members == (reborn,)
    assert roster.get("b") is None


def test_late_and_repeated_configurations_change_nothing() -> None:
    roster = Roster()
    a, b = member("a"), member("b")
    roster.apply(told(5, a, b))
    for late in (told(5, a), told(4), told(1, member("c"))):
        assert not roster.apply(late)
    assert roster.members == (a, b)


def test_successor_that_does_not_know_everybody_yet_takes_nobody_away() -> None:
    roster = Roster()
    a, b, c = member("a"), member("b"), member("c")
    roster.apply(told(9, a, b))
    assert roster.apply(told(1, b, c, coordinator=2, complete=False)) == Difference(joined=(c,))
    assert roster.members == (a, b, c)
    assert not roster.apply(told(10, coordinator=1))  # from the predecessor
    assert roster.apply(told(2, b, c, coordinator=2)) == Difference(gone=(a,))
