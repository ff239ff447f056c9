"""Control lowering on: the host composes batches at token boundaries, the workers do the rest without it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from poolweave.crosspool_engine._native import Board
from poolweave.crosspool_engine.config import MAX_RANKS, EngineConfig
from poolweave.crosspool_engine.control import SeatFinish, SlotTurn
from poolweave.crosspool_engine.running import Running
from poolweave.crosspool_engine.served_model import ServedModel

_EVACUATION_MS = 1  # between looks at slots that living workers still have


class LoweredControl:
    """Each model has `in_flight` slots on each attention rank; a request joins the emptiest at its next token boundary.

    `models` is the engine's, live.
    """

    def __init__(self, board: Board, models: Mapping[str, ServedModel], config: EngineConfig) -> None:
        self._board = board
        self._models = models
        self._config = config
        self._rows: dict[int, list[Running]] = {}  # slot -> its requests, as the workers see them
        self._joining: dict[int, list[Running]] = {}

    def place(self, running: Running) -> None:
        slots = self._slots(running.rank, running.model)
        slot = min(slots, key=lambda each: (self._load(each), each))
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

    def evacuate(self, doomed: Collection[Running], dead: Callable[[], Collection[int]]) -> None:
        slots = sorted({slot for each in doomed for slot in self._slots(each.rank, each.model)})
        while not all([self._quiet(slot, dead()) for slot in slots]):  # all are asked, to take each that can be
            self._board.rest(self._board.bell(), _EVACUATION_MS)
        for slot in slots:
            self._rows.pop(slot, None)
            self._joining.pop(slot, None)
            self._board.set_turn(slot, SlotTurn.IDLE)

    def _slots(self, rank: int, model: str) -> range:
        config = self._config
        first = rank * config.slots_per_rank + self._models[model].index * config.in_flight
        return range(first, first + config.in_flight)

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
        now, later = left[: self._config.max_batch], left[self._config.max_batch :]
        if later:
            self._joining[slot] = later
        if now:
            self._rows[slot] = now
            self._board.form(slot, self._models[now[0].model].index, [r.seat for r in now], now[0].rank)
        self._board.set_turn(slot, SlotTurn.READY if now else SlotTurn.IDLE)
        return over

    def _quiet(self, slot: int, dead: Collection[int]) -> bool:
        """Nobody alive will touch the slot again. One that waits to start is taken: it may find no room in flight."""
        turn = self._board.turn(slot)
        if turn in (SlotTurn.IDLE, SlotTurn.HOST) or self._board.take(slot):
            return True
        if turn >= SlotTurn.FFN:
            return self._config.attention_ranks + (turn - SlotTurn.FFN) % MAX_RANKS in dead
        return slot // self._config.slots_per_rank in dead
