from __future__ import annotations

from poolweave.serving.simulator.agenda import Agenda


def test_events_happen_in_time_and_ties_in_the_order_planned() -> None:
    agenda, seen = Agenda(), []

    def note(name: str) -> None:
        seen.append((agenda.now, name))
        if name == "b":
            agenda.at(0.0, note, "past")  # has passed: at once
            agenda.after(0.5, note, "later")

    for time_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (9.0, "never")):
        agenda.at(time_s, note, name)
    count = agenda.run(lambda: len(seen) == 5)
    assert seen == [(1.0, "a"), (1.0, "b"), (1.0, "past"), (1.5, "later"), (2.0, "c")]
    assert (count, len(agenda)) == (5, 1)
    assert agenda.run(lambda: False) == 1
