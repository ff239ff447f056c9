"""Control lowering off: the host moves every batch, one message and one answer a stage, by the pure pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from poolweave.crosspool_engine._native import Board
from poolweave.crosspool_engine.control import SeatFinish
from poolweave.crosspool_engine.crew import Crew
from poolweave.crosspool_engine.pipeline import Batch, Pipeline, PipelineConfig, PipelineModel, Turn
from poolweave.crosspool_engine.running import Running
from poolweave.crosspool_engine.served_model import ServedModel
from poolweave.crosspool_engine.worker_messages import Step
from poolweave.crosspool_engine.worker_process import WorkerProcess
from poolweave.errors import WorkerLost


@dataclass(slots=True)
class _Stage:
    """A slot's stage under way: who works on it, and which places do once they are done."""

    workers: set[WorkerProcess]
    later: tuple[int, ...] = ()


@dataclass(slots=True)
class _Rank:
    """One leading attention rank's pipeline and which slot each of its batches has."""

    number: int
    pipeline: Pipeline
    slots: dict[int, int] = field(default_factory=dict)  # batch number -> slot

    def batch_in(self, slot: int) -> Batch:
        return next(batch for batch in self.pipeline.batches if self.slots[batch.number] == slot)


class HostedControl:
    """`models` and the crew's workers are the engine's, live: a restarted worker takes its place."""

    def __init__(self, board: Board, models: Mapping[str, ServedModel], crew: Crew, in_flight: int) -> None:
        self._board = board
        self._models = models
        self._crew = crew
        self._config = PipelineConfig(in_flight=in_flight, max_batch=crew.config.max_batch)
        self._placed: dict[str, Running] = {}
        self._ranks: list[_Rank] = []
        self._known: Mapping[str, ServedModel] = {}
        self._over: list[Running] = []  # take part no more, not yet handed over
        self._busy: dict[int, _Stage] = {}  # by slot

    def place(self, running: Running) -> None:
        ranks = self._current()
        self._placed[running.name] = running
        ranks[running.leader].pipeline.add(running.name, running.model)

    def collect(self, timeout_s: float) -> list[Running]:
        ranks = self._current()
        self._start_stages(ranks)
        while self._busy and not self._over and self._any_answer(timeout_s):
            sampled = self._end_stages(ranks)
            self._start_stages(ranks)  # before the host does anything else: workers never wait for its bookkeeping
            if sampled:
                break  # tokens to tell, perhaps ends
        over, self._over = self._over, []
        return over

    def evacuate(self, doomed: Collection[Running], dead: Callable[[], Collection[int]]) -> None:
        self._settle()
        for running in doomed:
            self._placed.pop(running.name, None)
        self._over = [running for running in self._over if running not in doomed]

    def _current(self) -> list[_Rank]:
        """Pipelines over the models there are now, made anew when they changed."""
        if not self._ranks or self._known != self._models:
            self._settle()
            self._known = dict(self._models)
            shapes = {
                name: PipelineModel(num_layers=len(model.owners), layer_s=model.layer_cost, owners=model.owners)
                for name, model in self._models.items()
            }
            count = self._crew.config.attention_ranks
            self._ranks = [_Rank(number, Pipeline(shapes, self._config)) for number in range(count)]
            for running in self._placed.values():
                self._ranks[running.leader].pipeline.add(running.name, running.model)
        return self._ranks

    def _settle(self) -> None:
        """Let stages under way end, and drop the pipelines: batches begin their token again, which changes nothing."""
        for worker in self._workers():
            try:
                worker.await_stages()
            except WorkerLost:
                continue
            worker.ended_stages()
        self._busy.clear()
        self._ranks = []
        over = [r for r in self._placed.values() if self._board.finish(r.seat) != SeatFinish.RUNNING]
        self._over += over
        self._placed = {name: r for name, r in self._placed.items() if r not in over}

    def _start_stages(self, ranks: list[_Rank]) -> None:
        for rank in ranks:
            for turn in rank.pipeline.turns:
                while (batch := rank.pipeline.start(turn)) is not None:
                    slot = self._slot_of(rank, batch)
                    self._board.set_layer(slot, batch.layer)
                    if turn is Turn.ATTENTION:
                        self._begin_attention(rank, batch, slot)
                    else:
                        self._begin(slot, (self._crew.config.attention_ranks + rank.pipeline.rank_of(batch),))

    def _begin_attention(self, rank: _Rank, batch: Batch, slot: int) -> None:
        """All ranks that share the heads at once; the leader before them where it embeds, alone where it samples."""
        first, *others = self._placed[batch.requests[0]].ranks
        if rank.pipeline.is_sampling(batch):
            self._begin(slot, (first,))
        elif batch.layer == 0:
            self._begin(slot, (first,), later=tuple(others))
        else:
            self._begin(slot, (first, *others))

    def _begin(self, slot: int, places: Sequence[int], *, later: tuple[int, ...] = ()) -> None:
        workers = [self._crew.workers[place] for place in places]
        self._busy[slot] = _Stage(set(workers), later)
        for worker in workers:
            worker.begin_stage(Step(slot), slot)

    def _workers(self) -> set[WorkerProcess]:
        return {worker for stage in self._busy.values() for worker in stage.workers}

    def _end_stages(self, ranks: list[_Rank]) -> bool:
        """Take what answers there are. -> whether a batch had its sampling turn"""
        sampled = False
        for worker in self._workers():
            for slot in worker.ended_stages():
                stage = self._busy[slot]
                stage.workers.discard(worker)
                if not stage.workers:
                    sampled |= self._end_stage(ranks[slot // self._crew.config.slots_per_rank], slot)
        return sampled

    def _end_stage(self, rank: _Rank, slot: int) -> bool:
        """-> whether this was the sampling turn"""
        stage = self._busy.pop(slot)
        batch = rank.batch_in(slot)
        if stage.later:
            self._begin(slot, stage.later)
            return False
        if not rank.pipeline.is_sampling(batch):
            rank.pipeline.finish(batch.number)
            return False
        rows = [self._placed[name] for name in batch.requests]
        over = [r for r in rows if r.cancelled or self._board.finish(r.seat) != SeatFinish.RUNNING]
        del rank.slots[batch.number]
        rank.pipeline.finish(batch.number, [running.name for running in over])
        for running in over:
            del self._placed[running.name]
        self._over += over
        return True

    def _any_answer(self, timeout_s: float) -> bool:
        """Wait for an answer to a stage. Raises WorkerLost when none can come any more."""
        busy = self._workers()
        if any(worker.has_ended for worker in busy) or wait([worker.channel for worker in busy], timeout_s):
            return True
        for worker in busy:
            if not worker.alive:
                raise worker.lost()
        return False

    def _slot_of(self, rank: _Rank, batch: Batch) -> int:
        if batch.number not in rank.slots:
            first = rank.number * self._crew.config.slots_per_rank
            slot = min(set(range(first, first + self._config.in_flight)) - set(rank.slots.values()))
            rank.slots[batch.number] = slot
            seats = [self._placed[name].seat for name in batch.requests]
            self._board.form(slot, self._models[batch.model].index, seats, list(self._placed[batch.requests[0]].ranks))
        return rank.slots[batch.number]
