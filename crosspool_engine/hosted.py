"""Control lowering off: the host moves every batch, one message and one answer a stage, by the pure pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import wait

from poolweave.crosspool_engine._native import Board
from poolweave.crosspool_engine.control import SeatFinish
from poolweave.crosspool_engine.pipeline import Batch, Pipeline, PipelineConfig, PipelineModel, Turn
from poolweave.crosspool_engine.request import Running
from poolweave.crosspool_engine.served_model import ServedModel
from poolweave.crosspool_engine.worker_messages import Step
from poolweave.crosspool_engine.worker_process import WorkerProcess
from poolweave.errors import WorkerLost


class HostedControl:
    """`models` and `workers` (attention, then FFN ranks) are the engine's, live: a restarted worker takes its place."""

    def __init__(
        self, board: Board, models: Mapping[str, ServedModel], workers: Sequence[WorkerProcess], config: PipelineConfig
    ) -> None:
        self._board = board
        self._models = models
        self._workers = workers
        self._config = config
        self._placed: dict[str, Running] = {}
        self._pipeline: Pipeline | None = None
        self._known: Mapping[str, ServedModel] = {}
        self._over: list[Running] = []  # take part no more, not yet handed over
        self._slots: dict[int, int] = {}  # batch number -> slot
        self._running: dict[tuple[WorkerProcess, int], int] = {}  # (worker, slot) -> batch number

    def place(self, running: Running) -> None:
        pipeline = self._current()
        self._placed[running.name] = running
        pipeline.add(running.name, running.request.model)

    def collect(self, timeout_s: float) -> list[Running]:
        pipeline = self._current()
        self._start_stages(pipeline)
        while self._running and not self._over and self._any_answer(timeout_s):
            sampled = self._end_stages(pipeline)
            self._start_stages(pipeline)  # before the host does anything else: workers never wait for its bookkeeping
            if sampled:
                break  # tokens to tell, perhaps ends
        over, self._over = self._over, []
        return over

    def evacuate(self, models: frozenset[str], dead: Callable[[], Collection[int]]) -> list[Running]:
        self._settle()
        gone = [running for running in self._placed.values() if running.request.model in models]
        gone += [running for running in self._over if running.request.model in models]
        self._placed = {name: r for name, r in self._placed.items() if r not in gone}
        self._over = [running for running in self._over if running not in gone]
        return gone

    def _current(self) -> Pipeline:
        """The pipeline over the models there are now, made anew when they changed."""
        if self._pipeline is None or self._known != self._models:
            self._settle()
            self._known = dict(self._models)
            shapes = {
                name: PipelineModel(num_layers=len(model.owners), layer_s=model.layer_cost)
                for name, model in self._models.items()
            }
            self._pipeline = Pipeline(shapes, self._config)
            for running in self._placed.values():
                self._pipeline.add(running.name, running.request.model)
        return self._pipeline

    def _settle(self) -> None:
        """Let stages under way end, and drop the pipeline: batches begin their token again, which changes nothing."""
        for worker in {worker for worker, _ in self._running}:
            try:
                while worker.has_outstanding:
                    wait([worker.channel])
                    worker.ended_stages()
            except WorkerLost:
                continue
            worker.ended_stages()
        self._running.clear()
        self._slots.clear()
        self._pipeline = None
        over = [r for r in self._placed.values() if self._board.finish(r.seat) != SeatFinish.RUNNING]
        self._over += over
        self._placed = {name: r for name, r in self._placed.items() if r not in over}

    def _start_stages(self, pipeline: Pipeline) -> None:
        for turn in pipeline.turns:
            batch = pipeline.start(turn)
            if batch is None:
                continue
            slot = self._slot_of(batch)
            model = self._models[batch.model]
            worker = self._workers[0] if turn is Turn.ATTENTION else self._workers[1 + model.owners[batch.layer]]
            self._board.set_layer(slot, batch.layer)
            self._running[worker, slot] = batch.number
            worker.begin_stage(Step(slot), slot)

    def _end_stages(self, pipeline: Pipeline) -> bool:
        """Take what answers there are. -> whether a batch had its sampling turn"""
        sampled = False
        for worker in {worker for worker, _ in self._running}:
            for slot in worker.ended_stages():
                sampled |= self._end_stage(pipeline, worker, slot)
        return sampled

    def _any_answer(self, timeout_s: float) -> bool:
        """Wait for an answer to a stage. Raises WorkerLost when none can come any more."""
        busy = {worker for worker, _ in self._running}
        if any(worker.has_ended for worker in busy) or wait([worker.channel for worker in busy], timeout_s):
            return True
        for worker in busy:
            if not worker.alive:
                raise worker.lost()
        return False

    def _slot_of(self, batch: Batch) -> int:
        if batch.number not in self._slots:
            slot = min(set(range(self._config.in_flight)) - set(self._slots.values()))
            self._slots[batch.number] = slot
            seats = [self._placed[name].seat for name in batch.requests]
            self._board.form(slot, self._models[batch.model].index, seats)
        return self._slots[batch.number]

    def _end_stage(self, pipeline: Pipeline, worker: WorkerProcess, slot: int) -> bool:
        """-> whether this was the sampling turn"""
        number = self._running.pop((worker, slot))
        batch = next(each for each in pipeline.batches if each.number == number)
        if not pipeline.is_sampling(batch):
            pipeline.finish(number)
            return False
        rows = [self._placed[name] for name in batch.requests]
        over = [r for r in rows if r.cancelled or self._board.finish(r.seat) != SeatFinish.RUNNING]
        del self._slots[number]
        pipeline.finish(number, [running.name for running in over])
        for running in over:
            del self._placed[running.name]
        self._over += over
        return True
