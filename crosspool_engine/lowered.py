"""Control lowering on: the host composes batches at token boundaries, the workers do the rest without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from poolweave.crosspool_engine._native import Board
from poolweave.crosspool_engine.config import MAX_RANKS, EngineConfig
from poolweave.crosspool_engine.control import SeatFinish, SlotTurn
from poolweave.crosspool_engine.running import Running
from poolweave.crosspool_engine.served_model import ServedModel

_EVACUATION_MS = 1  # between looks at slots that living workers still have


class LoweredControl:
    """Each model has the configured `in_flight` slots on each attention rank; a request joins one at a token boundary.

    Of as many slots as fill what flies, beside the other models at work there, it takes the emptiest: rows of one batch
    read weights once. `in_flight`: how many fly now. `models` is the engine's, live.
    """

    def __init__(self, board: Board, models: Mapping[str, ServedModel], config: EngineConfig, in_flight: int) -> None:
        self._board = board
        self._models = models
        self._config = config
        self._in_flight = in_flight
        self._rows: dict[int, list[Running]] = {}  # slot -> its requests, as the workers see them
        self._joining: dict[int, list[Running]] = {}

    def place(self, running: Running) -> None:
        slot = self._slot_for(running)
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
        slots = {slot: each.ranks for each in doomed for slot in self._slots(each.leader, each.model)}
        while not all(
            [self._quiet(slot, ranks, dead()) for slot, ranks in slots.items()]
        ):  # all are asked, to take each that can be
            self._board.rest(self._board.bell(), _EVACUATION_MS)
        for slot in slots:
            self._rows.pop(slot, None)
            self._joining.pop(slot, None)
            self._board.set_turn(slot, SlotTurn.IDLE)

    def _slots(self, rank: int, model: str) -> range:
        config = self._config
        first = rank * config.slots_per_rank + self._models[model].index * config.in_flight
        return range(first, first + config.in_flight)

    def _slot_for(self, running: Running) -> int:
        slots = self._slots(running.leader, running.model)
        own = range(running.leader * self._config.slots_per_rank, (running.leader + 1) * self._config.slots_per_rank)
        at_work = {running.model, *(row.model for slot in own for row in self._all_rows(slot))}
        enough = slots[: math.ceil(self._in_flight / len(at_work))]
        room = [slot for slot in enough if self._load(slot) < self._config.max_batch]
        return min(room or slots, key=lambda each: (self._load(each), each))

    def _all_rows(self, slot: int) -> list[Running]:
        return self._rows.get(slot, []) + self._joining.get(slot, [])

    def _load(self, slot: int) -> int:
        return len(self._all_rows(slot))

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
            self._board.form(slot, self._models[now[0].model].index, [r.seat for r in now], list(now[0].ranks))
        self._board.set_turn(slot, SlotTurn.READY if now else SlotTurn.IDLE)
        return over

    def _quiet(self, slot: int, ranks: Sequence[int], dead: Collection[int]) -> bool:
        """Nobody alive will touch the slot again. One that waits to start is taken: it may find no room in flight.

        `ranks` share its heads: those alive are done with it when all that miss are dead.
        """
        turn = self._board.turn(slot)
        if turn in (SlotTurn.IDLE, SlotTurn.HOST) or self._board.take(slot):
            return True
        if turn >= SlotTurn.FFN:
            return self._config.attention_ranks + (turn - SlotTurn.FFN) % MAX_RANKS in dead
        arrived = self._board.arrived(slot)
        return all(rank in dead or arrived >> rank & 1 for rank in ranks)
