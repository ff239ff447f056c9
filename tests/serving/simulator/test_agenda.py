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


def test_a_series_happens_as_if_each_of_it_was_planned_at_once() -> None:
    seen: dict[str, list[tuple[float, str]]] = {}
    for way in ("series", "each"):
        agenda, seen[way] = Agenda(), []

        def note(name: object, agenda: Agenda = agenda, way: str = way) -> None:
            seen[way].append((agenda.now, str(name)))
            if name == 1:
                agenda.at(2.0, note, "between")

        agenda.at(2.0, note, "before")
        times = [-1.0, 1.0, 2.0, 2.0, 3.0]
        if way == "series":
            agenda.each(times, note)
        else:
            for i, time_s in enumerate(times):
                agenda.at(time_s, note, i)
        agenda.at(2.0, note, "after")
        assert agenda.run(lambda: False) == 8
    assert seen["series"] == seen["each"]
    assert [name for _, name in seen["each"]] == ["0", "1", "before", "2", "3", "after", "between", "4"]
