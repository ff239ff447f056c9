"""Which batch a request joins with control lowering on: a board that only keeps what was formed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from poolweave.crosspool_engine.config import EngineConfig
from poolweave.crosspool_engine.control import SlotTurn
from poolweave.crosspool_engine.lowered import LoweredControl


class KeptBoard:
    """Slots that stay with the workers until `come_back`."""

    def __init__(self) -> None:
        self.turns: dict[int, int] = {}
        self.formed: dict[int, list[int]] = {}

    def turn(self, slot: int) -> int:
        return self.turns.get(slot, SlotTurn.IDLE)

    def set_turn(self, slot: int, turn: int) -> None:
        self.turns[slot] = turn
        if turn == SlotTurn.IDLE:
            self.formed.pop(slot, None)

    def form(self, slot: int, model: int, seats: list[int], ranks: list[int]) -> None:
        self.formed[slot] = seats

    def come_back(self) -> None:
        self.turns = {slot: SlotTurn.HOST for slot in self.formed}

    def call(self, slot: int) -> None: ...
    def finish(self, seat: int) -> int:
        return 0

    def bell(self) -> int:
        return 0


def control(board: Any, in_flight: int, max_batch: int = 4) -> LoweredControl:
    models: Any = {name: SimpleNamespace(index=number) for number, name in enumerate("abc")}
    config = EngineConfig(kv_budget="8MiB", max_models=3, in_flight=2, max_batch=max_batch)
    return LoweredControl(board, models, config, in_flight)


def place(lowered: LoweredControl, names: str) -> None:
    """One request a letter, seated in order."""
    for seat, name in enumerate(names):
        running: Any = SimpleNamespace(model=name, seat=seat, leader=0, ranks=(0,), cancelled=False)
        lowered.place(running)


@pytest.mark.parametrize(
    ("in_flight", "names", "batches"),
    [
        (2, "abcabc", {0: [0, 3], 2: [1, 4], 4: [2, 5]}),  # models fill what flies: a batch of each
        (2, "ababab", {0: [0, 2, 4], 2: [1, 3, 5]}),
        (2, "aaaa", {0: [0, 2], 1: [1, 3]}),  # one alone: two batches, so that one can be at either side
        (1, "aaaa", {0: [0, 1, 2, 3]}),
        (1, "aaaaaa", {0: [0, 1, 2, 3], 1: [4, 5]}),  # more than a batch holds
    ],
)
def test_rows_share_a_batch_unless_another_is_needed_to_fill_what_flies(
    in_flight: int, names: str, batches: dict[int, list[int]]
) -> None:
    board = KeptBoard()
    lowered = control(board, in_flight)
    place(lowered, names)
    board.come_back()  # those that joined are formed at the next token boundary
    assert lowered.collect(0.0) == []
    assert board.formed == batches
