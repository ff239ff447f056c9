"""Runs a trace against the real scheduler and membership code, under a virtual clock. Source: MemServe §8.

The fleet's time is the only clock; all randomness comes from the seed: the same configuration and trace give the
same report. An event is an arrival, the end of a prefill, a transfer or a decode, a heartbeat, or a fault. Instances
and the clock are native; whatever the scheduler, its policies and its cost model decide is asked of them.
"""

from __future__ import annotations

import gc
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import msgspec

from poolweave.errors import NoInstance
from poolweave.scheduler.global_scheduler import GlobalScheduler
from poolweave.scheduler.prompt_tree import Source
from poolweave.scheduler.routes import Prompt, Route
from poolweave.serving.simulator._native import SimulatedFleet
from poolweave.serving.simulator.agenda import Agenda
from poolweave.serving.simulator.config import Flow, SimulationConfig
from poolweave.serving.simulator.control_plane import ControlPlane
from poolweave.serving.simulator.park import Park
from poolweave.serving.simulator.report import SimulationReport, Spread
from poolweave.serving.simulator.traces import Trace
from poolweave.types import UInt64Array

_RETRY_S = 1.0  # nobody accepts work: ask again


class _Attempt(msgspec.Struct, frozen=True, eq=False):
    number: int  # of the request
    route: Route


class Simulation:
    """One run. `run()` once. `answered` is called at the end of each request."""

    def __init__(self, config: SimulationConfig, trace: Trace, answered: Callable[[], None] | None = None) -> None:
        self.config = config
        self.trace = trace
        self._answered = answered
        self._park = Park(config, trace)
        self._fleet = self._park.fleet
        self.agenda = Agenda(self._fleet)
        scheduling = replace(
            config.scheduler, block_tokens=trace.block_tokens, returns_answers=config.flow is Flow.PD_CACHING_3,
            kv_link=config.device.kv_link if config.moves_kv else None,
        )  # fmt: skip
        self.scheduler = GlobalScheduler(config.device.model, scheduling, clock=self._fleet.now)
        self._control = ControlPlane(config, self.agenda, self.scheduler, self)
        self._jobs: dict[str, int] = {}  # by request id, while in flight
        self._attempts: list[_Attempt] = []  # by job
        self._turns: dict[str, deque[int]] = defaultdict(deque)  # requests of a session that wait for the one before
        self._talking: set[str] = set()
        self._sent: dict[int, float] = {}  # a turn is sent when the answer before it is there
        self._ttft: dict[int, float] = {}
        self._jct: dict[int, float] = {}
        self._cached_tokens = 0
        self._prefilled_tokens = 0
        self._retried = 0

    def run(self) -> SimulationReport:
        """Play the trace to its end, or to the horizon."""
        self._control.begin()
        self._fleet.arrivals([request.arrival_s for request in self.trace.requests])
        # A run makes no reference cycles, but millions of objects that the collector would walk again and again.
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._play()
        finally:
            if collecting:
                gc.enable()
        return self._report()

    def _play(self) -> None:
        """Answer the fleet's questions and hear its news until all is answered."""
        model, link, tell = self.config.device.model, self.config.device.kv_link.link, self._fleet.next
        prefill_time, step_time, transfer_time = (
            SimulatedFleet.PREFILL_TIME,
            SimulatedFleet.STEP_TIME,
            SimulatedFleet.TRANSFER_TIME,
        )
        hear: dict[int, Callable[[int, int, UInt64Array | None], None]] = {
            SimulatedFleet.CALL: lambda mark, _b, _gone: self.agenda.happen(mark),
            SimulatedFleet.ARRIVED: self._arrive,
            SimulatedFleet.PREFILLED: self._prefilled,
            SimulatedFleet.FINISHED: self._finished,
            SimulatedFleet.HAND_OVER_FAILED: self._hand_over_failed,
            SimulatedFleet.RETURNED: self._returned,
            SimulatedFleet.REPLICATED: self._replicated,
        }
        jct, total, answer = self._jct, len(self.trace.requests), 0.0
        while len(jct) < total:
            news, a, b, gone = tell(answer)
            if news == step_time:
                answer = model.decode_step_s(a, b)
            elif news == prefill_time:
                answer = model.prefill_s(a, b)
            elif news == transfer_time:
                answer = link.seconds(a, b)
            elif news == SimulatedFleet.DONE:
                return
            else:
                hear[news](a, b, gone)

    # --- requests ----------------------------------------------------------------------------------------

    def _arrive(self, number: int, _b: int, _gone: UInt64Array | None) -> None:
        session = self.trace.requests[number].session
        if session is not None:
            if session in self._talking:
                self._turns[session].append(number)
                return
            self._talking.add(session)
        self._place(number)

    def _place(self, number: int) -> None:
        request = self.trace.requests[number]
        self._sent.setdefault(number, self._fleet.now())
        request_id = f"{number}.{len(self._attempts)}"
        prompt = Prompt(
            keys=request.keys,
            num_tokens=request.num_tokens,
            session=request.session,
            request_id=request_id,
            output_tokens=request.output_tokens,
        )
        try:
            route = self.scheduler.place(prompt)
        except NoInstance:
            self.agenda.after(_RETRY_S, self._place, number)
            return
        if route.replicate is not None:
            self._park.replicate(number, route.replicate)
        self._jobs[request_id] = self._park.start(number, route)
        self._attempts.append(_Attempt(number, route))

    # --- what the fleet tells ----------------------------------------------------------------------------

    def _prefilled(self, job: int, cached_tokens: int, gone: UInt64Array | None) -> None:
        attempt = self._attempts[job]
        number, route = attempt.number, attempt.route
        if number not in self._ttft:
            self._ttft[number] = self._fleet.now() - self._sent[number]
        self._cached_tokens += cached_tokens
        self._prefilled_tokens += self.trace.requests[number].num_tokens
        if gone is not None:
            self._evicted(route.prefill, gone)
        self.scheduler.prefilled(route.request_id)

    def _hand_over_failed(self, job: int, _b: int, _gone: UInt64Array | None) -> None:
        request_id = self._attempts[job].route.request_id
        self.scheduler.failed(request_id)
        self.lost([request_id])

    def _finished(self, job: int, _b: int, gone: UInt64Array | None) -> None:
        attempt = self._attempts[job]
        number, route = attempt.number, attempt.route
        request = self.trace.requests[number]
        del self._jobs[route.request_id]
        self._jct[number] = self._fleet.now() - self._sent[number]
        if self._answered is not None:
            self._answered()
        if gone is not None:
            self._evicted(route.decode or route.prefill, gone)
        self.scheduler.finished_keys(route.request_id, request.answer_keys)
        if request.session is not None:
            waiting = self._turns[request.session]
            if waiting:
                self._place(waiting.popleft())
            else:
                self._talking.discard(request.session)

    def _returned(self, seat: int, _b: int, gone: UInt64Array | None) -> None:
        if gone is not None:
            self._evicted(self._park.names[seat], gone)

    def _replicated(self, number: int, _b: int, _gone: UInt64Array | None) -> None:
        replica = self._park.arrived_replica(number)
        if replica.name not in self.scheduler.fleet.slots:
            return
        gone = self._park.keep(replica)
        if gone is not None:
            self._evicted(replica.name, gone)
        keys = self.trace.requests[replica.number].keys[: replica.blocks]
        self.scheduler.holdings.learned(replica.name, keys, Source.RESPONSE)

    def _evicted(self, name: str, keys: UInt64Array) -> None:
        if self.config.tells_evictions:
            self._control.send(self._told_eviction, name, keys)

    def _told_eviction(self, name: str, keys: UInt64Array) -> None:
        if name in self.scheduler.fleet.slots:
            self.scheduler.holdings.taken_back(name, keys)

    # --- instances (Lives) -------------------------------------------------------------------------------

    def begin_life(self, name: str) -> None:
        self._park.begin_life(name)

    def end_life(self, name: str) -> None:
        self._park.end_life(name)

    def lost(self, request_ids: Iterable[str]) -> None:
        """Their instances are gone: make each again."""
        for request_id in request_ids:
            job = self._jobs.pop(request_id)
            self._fleet.give_up(job)
            self._retried += 1
            self._place(self._attempts[job].number)

    def _report(self) -> SimulationReport:
        busy = self._park.busy_s()
        mean = sum(busy.values()) / len(busy)
        gaps = [
            (self._jct[n] - self._ttft[n]) / (self.trace.requests[n].output_tokens - 1)
            for n in self._jct
            if self.trace.requests[n].output_tokens > 1
        ]
        return SimulationReport(
            policy=self.config.scheduler.policy,
            flow=self.config.flow.value,
            num_requests=len(self.trace.requests),
            answered=len(self._jct),
            unfinished=len(self.trace.requests) - len(self._jct),
            retried=self._retried,
            ttft=Spread.of(list(self._ttft.values())),
            jct=Spread.of(list(self._jct.values())),
            tpot=Spread.of(gaps),
            hit_ratio=self._cached_tokens / self._prefilled_tokens if self._prefilled_tokens else 0.0,
            believed_hit_ratio=self.scheduler.stats().hit_ratio,
            balance=max(busy.values()) / mean if mean else 1.0,
            moved_bytes=self._fleet.moved_bytes,
            simulated_s=self._fleet.now(),
            events=self._fleet.events,
            expired_members=self._control.expired,
        )


def compare_policies(
    config: SimulationConfig, trace: Trace, policies: Iterable[str], answered: Callable[[], None] | None = None
) -> Mapping[str, SimulationReport]:
    """The same trace under each of these policies. `answered` is called at the end of each request of each."""
    return {
        policy: Simulation(replace(config, scheduler=replace(config.scheduler, policy=policy)), trace, answered).run()
        for policy in policies
    }
