"""DecodeEngine: several cold models decoded from one KV pool and one weights pool. Source: CrossPool.

Composed of a crew (worker processes), a board (hidden states and turns), a KV pool an attention rank (pages under one
budget), a roster (models), an admission queue, a desk (requests) and a control (lowered or hosted). Needs no torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType

from poolweave.crosspool_engine._native import Board
from poolweave.crosspool_engine.admission import Admission
from poolweave.crosspool_engine.config import EngineConfig
from poolweave.crosspool_engine.control import Control
from poolweave.crosspool_engine.crew import Crew
from poolweave.crosspool_engine.desk import Desk
from poolweave.crosspool_engine.engine_stats import EngineStats
from poolweave.crosspool_engine.hosted import HostedControl
from poolweave.crosspool_engine.kv_pool import KvPool
from poolweave.crosspool_engine.lowered import LoweredControl
from poolweave.crosspool_engine.planner.plan import Plan
from poolweave.crosspool_engine.request import DecodeRequest, Emitted, Generation
from poolweave.crosspool_engine.roster import Roster
from poolweave.crosspool_engine.running import Running
from poolweave.crosspool_engine.served_model import Serving
from poolweave.crosspool_engine.timeline import StageRun, read_stages
from poolweave.errors import ConfigError, InstanceClosed, Overloaded, RequestRefused, WorkerLost
from poolweave.mempool import Arena

_log = logging.getLogger(__name__)


class DecodeEngine:
    """Decodes requests whose KV prefill computed, or computes it itself a token a step. Close it, best by `with`.

    One thread drives it: `add`, then `step` until `has_work` is false. With control lowering on, tokens come whether or
    not it steps; a step tells them and composes batches. An admitted request has room for its last token from the
    start: it is never interrupted. With a `plan` (its config by planned_config) models are served as it places them,
    others refused. Raises ConfigError, and WorkerLost when the workers do not come up.
    """

    def __init__(
        self, config: EngineConfig, *, plan: Plan | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self._clock = clock
        self._closed = False
        self._board = Board.create({**config.board_sizes})
        ranks = range(config.attention_ranks)
        arenas = [Arena(config.budget_pages(r) * config.page_bytes, page_bytes=config.page_bytes) for r in ranks]
        self._crew = Crew(config, self._board, arenas)
        self._pools = [KvPool(rank, arenas[rank], self._crew) for rank in ranks]
        self._desk = Desk(self._board, config.seats)
        self._admission = Admission(config.max_waiting, config.deadline_s)
        self._roster = Roster(self._board, self._crew, self._pools, plan)
        self._control: Control = self._make_control(config.lowered, config.in_flight)

    # --- models ---------------------------------------------------------------------------------------------

    def activate(self, name: str, serving: Serving) -> None:
        """Serve the model in a Hugging Face directory. All or nothing: a failure leaves everything as it was.

        Raises ConfigError for what cannot be decoded, naming it, ModelNotFound, WorkerLost.
        """
        self._check_open()
        self._roster.activate(name, serving)

    def deactivate(self, name: str) -> None:
        """Give a model's weights and KV range back. Raises ConfigError while requests of it are here."""
        self._check_open()
        self._roster.get(name)
        busy = sum(running.request.model == name for running in self._desk.running.values())
        if busy or self._admission.count(name):
            raise ConfigError(f"{name!r} has {busy} requests running, {self._admission.count(name)} waiting")
        self._roster.deactivate(name)

    # --- requests -------------------------------------------------------------------------------------------

    def add(self, request: DecodeRequest) -> None:
        """Queue a request. Raises RequestRefused when it can never run here, Overloaded when the queue is full (try
        again later), WorkerLost while its model waits for restart(); then nothing is kept.
        """
        self._check_open()
        name = request.request_id
        if name in self._desk.running or name in self._desk.results or self._admission.holds(name):
            raise RequestRefused(f"request {name!r} is here already")
        model = self._roster.get(request.model)
        lost = self._roster.lost(request.model)
        if lost is not None:
            raise lost
        model.refuse_impossible(request, self.config)
        if not any(
            replica.can_ever(request.model, request.end - 1) for replica in self._roster.replicas(request.model)
        ):
            pages = max(sum(self.config.budget_pages(rank) for rank in ranks) for ranks in model.replicas)
            raise RequestRefused(
                f"{request.end} tokens never fit the KV budget of {pages} pages", needed=request.end, limit=pages
            )
        self._admission.add(request, self._clock())

    def cancel(self, request_id: str) -> bool:
        """End a request at its next token boundary; a step tells it. False when it is not here."""
        running = self._desk.running.get(request_id)
        if running is not None:
            running.cancelled = True
            return True
        waiting = self._admission.remove(request_id)
        if waiting is not None:
            self._desk.end_unseated(waiting, "cancelled", None)
        return waiting is not None

    def step(self, timeout_s: float = 0.05) -> list[Emitted]:
        """Admit what fits, move things on or wait up to `timeout_s`, and tell what happened since the last step."""
        self._check_open()
        for late in self._admission.expire(self._clock()):
            self._desk.end_unseated(late, "error", Overloaded("no room came by the request's deadline"))
        try:
            self._admission.admit(self._enter)
            if self._desk.running:
                for running in self._control.collect(0.0 if self._desk.has_news else timeout_s):
                    self._desk.end(running)
        except WorkerLost as lost:
            _log.error("%s", lost)
        self._look_after_workers()
        return self._desk.take_news()

    def result(self, request_id: str) -> Generation:
        """What came of a request that ended; given once. Raises KeyError for one that has not."""
        return self._desk.results.pop(request_id)

    @property
    def has_work(self) -> bool:
        """Some request has not ended, or its end was not told yet."""
        return bool(self._desk.running) or self._desk.has_news or len(self._admission) > 0

    # --- whole engine ---------------------------------------------------------------------------------------

    def set_control(self, *, lowered: bool, in_flight: int) -> None:
        """Change who moves batches, and how many fly at once: the four cells of the paper's ablation on one engine.

        `in_flight` is at most the configured one. Raises ConfigError while there is work.
        """
        self._check_open()
        if self.has_work or not 1 <= in_flight <= self.config.in_flight:
            raise ConfigError(
                f"the control changes only while idle, to an in_flight of 1 to {self.config.in_flight}",
                setting="in_flight", value=in_flight, limit=self.config.in_flight,
            )  # fmt: skip
        self._control = self._make_control(lowered, in_flight)

    def restart(self) -> None:
        """Replace workers that died and load what they served. Raises as activate(): repeat it then."""
        self._check_open()
        self._look_after_workers()
        self._roster.restart()

    @property
    def has_lost_workers(self) -> bool:
        """A worker died and was not replaced: restart()."""
        return bool(self._crew.dead())

    def drop_history(self) -> None:
        """Give up the KV of requests that ended; its memory goes back."""
        for name, model in self._roster.models.items():
            for rank in model.ranks:
                self._pools[rank].drop_history(name)

    def worker_pids(self) -> tuple[int, ...]:
        """By place: attention ranks', then FFN ranks'."""
        return tuple(worker.pid for worker in self._crew.workers)

    def stats(self) -> EngineStats:
        names = tuple(self._roster.models)
        return EngineStats(
            models=names, lost=tuple(name for name in names if self._roster.lost(name)),
            running=len(self._desk.running), waiting=len(self._admission),
            kv=tuple(pool.stats() for pool in self._pools), kv_bytes=sum(pool.held_bytes for pool in self._pools),
            history_blocks=sum(pool.num_history for pool in self._pools),
        )  # fmt: skip

    def stages(self) -> tuple[StageRun, ...]:
        """The last stages of each worker, up to the configured `events`, by start; any time."""
        return read_stages(self._board, self.config, {m.index: name for name, m in self._roster.models.items()})

    def check(self) -> None:
        """Assert all invariants; for tests."""
        self._desk.check()
        for pool in self._pools:
            pool.check()

    def close(self) -> None:
        """End the workers; requests that have not ended are dropped. Idempotent."""
        if not self._closed:
            self._closed = True
            self._crew.close()

    def __enter__(self) -> DecodeEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- private --------------------------------------------------------------------------------------------

    def _make_control(self, lowered: bool, in_flight: int) -> Control:
        self._board.set_in_flight(in_flight)
        if lowered:
            return LoweredControl(self._board, self._roster.models, self.config, in_flight)
        return HostedControl(self._board, self._roster.models, self._crew, in_flight)

    def _enter(self, request: DecodeRequest) -> bool:
        running = self._desk.seat(request, self._roster.eligible(request.model))
        if running is not None:
            self._control.place(running)
        return running is not None

    def _look_after_workers(self) -> None:
        """End the requests that need a worker which died; what they held comes back. Others go on."""
        fresh = self._roster.notice_deaths()
        if not fresh:
            return
        running_now = self._desk.running.values()
        doomed = {each: lost for place, lost in fresh.items() for each in running_now if self._needs(each, place)}
        self._control.evacuate(doomed, self._crew.dead)
        for running, lost in doomed.items():
            self._desk.end(running, lost)
        for name in self._roster.models:
            gone = self._roster.lost(name)
            for waiting in self._admission.drain(name) if gone else ():
                self._desk.end_unseated(waiting, "error", gone)
        for pool in self._pools:
            if pool.rank in fresh:
                pool.forget()

    def _needs(self, running: Running, place: int) -> bool:
        return place in running.ranks or place in self._roster.models[running.model].ffn_places

    def _check_open(self) -> None:
        if self._closed:
            raise InstanceClosed("this decode engine was closed")
