"""Control lowering on: the host composes batches at token boundaries, the workers do the rest without it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from poolweave.crosspool_engine._native import Board
from poolweave.crosspool_engine.config import EngineConfig
from poolweave.crosspool_engine.control import SeatFinish, SlotTurn
from poolweave.crosspool_engine.request import Running
from poolweave.crosspool_engine.served_model import ServedModel

_EVACUATION_MS = 1  # between looks at slots that living workers still have


class LoweredControl:
    """Each model has `in_flight` slots of its own; a request joins the emptiest of them at its next token boundary.

    `models` is the engine's, live.
    """

    def __init__(self, board: Board, models: Mapping[str, ServedModel], config: EngineConfig) -> None:
        self._board = board
        self._models = models
        self._in_flight = config.in_flight
        self._max_batch = config.max_batch
        self._rows: dict[int, list[Running]] = {}  # slot -> its requests, as the workers see them
        self._joining: dict[int, list[Running]] = {}

    def place(self, running: Running) -> None:
        slots = self._slots(running.request.model)
        slot = min(slots, key=lambda each: (self._load(each), each))
        running.slot = slot
        self._joining.setdefault(slot, []).append(running)
        if self._board.turn(slot) == SlotTurn.IDLE:
            self._compose(slot)
        else:
            self._board.call(slot)

    def collect(self, timeout_s: float) -> list[Running]:
        seen = self._board.bell()
        ended = self._take_over()
        if not ended and timeout_s > 0:
            self._board.rest(seen, max(1, round(1000 * timeout_s)))
            ended = self._take_over()
        return ended

    def evacuate(self, models: frozenset[str], dead: Callable[[], Collection[int]]) -> list[Running]:
        slots = [slot for model in models for slot in self._slots(model)]
        while not all(self._quiet(slot, dead()) for slot in slots):
            self._board.rest(self._board.bell(), _EVACUATION_MS)
        gone: list[Running] = []
        for slot in slots:
            gone += self._rows.pop(slot, []) + self._joining.pop(slot, [])
            self._board.set_turn(slot, SlotTurn.IDLE)
        return gone

    def _slots(self, model: str) -> range:
        first = self._models[model].index * self._in_flight
        return range(first, first + self._in_flight)

    def _load(self, slot: int) -> int:
        return len(self._rows.get(slot, ())) + len(self._joining.get(slot, ()))

    def _take_over(self) -> list[Running]:
        """Compose every slot that came to the host; cancelled requests come off at their next boundary."""
        ended: list[Running] = []
        for slot, rows in list(self._rows.items()):
            if self._board.turn(slot) == SlotTurn.HOST:
                ended += self._compose(slot)
            elif any(running.cancelled for running in rows):
                self._board.call(slot)
        return ended

    def _compose(self, slot: int) -> list[Running]:
        rows = self._rows.pop(slot, []) + self._joining.pop(slot, [])
        over = [r for r in rows if r.cancelled or self._board.finish(r.seat) != SeatFinish.RUNNING]
        left = [r for r in rows if r not in over]
        now, later = left[: self._max_batch], left[self._max_batch :]
        if later:
            self._joining[slot] = later
        if now:
            self._rows[slot] = now
            self._board.form(slot, self._models[now[0].request.model].index, [r.seat for r in now])
        self._board.set_turn(slot, SlotTurn.READY if now else SlotTurn.IDLE)
        return over

    def _quiet(self, slot: int, dead: Collection[int]) -> bool:
        """Nobody alive will touch the slot again."""
        turn = self._board.turn(slot)
        if turn in (SlotTurn.IDLE, SlotTurn.HOST):
            return True
        return (0 if turn < SlotTurn.FFN else 1 + turn - SlotTurn.FFN) in dead
