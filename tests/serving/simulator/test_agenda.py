from __future__ import annotations

import math

from poolweave.serving.simulator._native import SimulatedFleet
from poolweave.serving.simulator.agenda import Agenda


def empty_fleet(horizon_s: float = math.inf) -> SimulatedFleet:
    return SimulatedFleet(
        block_tokens=16,
        kv_bytes_per_token=0,
        prefill_keeps=True,
        decode_keeps=True,
        returns=True,
        horizon_s=horizon_s,
    )


def play(fleet: SimulatedFleet, agenda: Agenda, arrived: list[tuple[float, str]]) -> None:
    """Make the planned calls and note the arrivals until nothing is left to do."""
    while (told := fleet.next(0.0))[0] != SimulatedFleet.DONE:
        if told[0] == SimulatedFleet.CALL:
            agenda.happen(told[1])
        else:
            assert told[0] == SimulatedFleet.ARRIVED
            arrived.append((fleet.now(), str(told[1])))


def test_calls_happen_in_time_and_ties_in_the_order_planned() -> None:
    fleet = empty_fleet(horizon_s=2.0)
    agenda, seen = Agenda(fleet), []

    def note(name: str) -> None:
        seen.append((agenda.now, name))
        if name == "b":
            agenda.at(0.0, note, "past")  # has passed: at once
            agenda.after(0.5, note, "later")

    for time_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (9.0, "never")):
        agenda.at(time_s, note, name)
    play(fleet, agenda, [])
    assert seen == [(1.0, "a"), (1.0, "b"), (1.0, "past"), (1.5, "later"), (2.0, "c")]
    assert (fleet.events, len(agenda), fleet.planned) == (5, 1, 1)


def test_arrivals_happen_as_if_each_was_planned_at_once() -> None:
    fleet = empty_fleet()
    agenda, seen = Agenda(fleet), []

    def note(name: str) -> None:
        seen.append((agenda.now, name))

    agenda.at(2.0, note, "before")
    fleet.arrivals([-1.0, 1.0, 2.0, 2.0, 3.0])
    agenda.at(2.0, note, "after")
    play(fleet, agenda, seen)
    assert [name for _, name in seen] == ["0", "1", "before", "2", "3", "after", "4"]
    assert [time_s for time_s, _ in seen] == [0.0, 1.0, 2.0, 2.0, 2.0, 2.0, 3.0]
