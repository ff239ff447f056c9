"""Runs a trace against the real scheduler and membership code, under a virtual clock. Source: MemServe §8.

The agenda's time is the only clock; all randomness comes from the seed: the same configuration and trace give the
same report. An event is an arrival, the end of a prefill, a transfer or a decode, a heartbeat, or a fault.
"""

from __future__ import annotations

import gc
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from poolweave.errors import NoInstance
from poolweave.scheduler.global_scheduler import GlobalScheduler
from poolweave.scheduler.prompt_tree import Source
from poolweave.scheduler.routes import Prompt, Replication
from poolweave.serving.simulator.agenda import Agenda
from poolweave.serving.simulator.config import Flow, SimulationConfig
from poolweave.serving.simulator.control_plane import ControlPlane
from poolweave.serving.simulator.instance import Job, SimulatedInstance
from poolweave.serving.simulator.report import SimulationReport, Spread
from poolweave.serving.simulator.traces import Trace, TraceRequest
from poolweave.types import Role, UInt64Array

_RETRY_S = 1.0  # nobody accepts work: ask again


class Simulation:
    """One run. `run()` once. `answered` is called at the end of each request."""

    def __init__(self, config: SimulationConfig, trace: Trace, answered: Callable[[], None] | None = None) -> None:
        self.config = config
        self._answered = answered
        self._groups = config.names
        self.trace = trace
        self.agenda = Agenda()
        self._returns = config.flow is Flow.PD_CACHING_3
        scheduling = replace(config.scheduler, block_tokens=trace.block_tokens, returns_answers=self._returns)
        self.scheduler = GlobalScheduler(config.device.model, scheduling, clock=lambda: self.agenda.now)
        self._control = ControlPlane(config, self.agenda, self.scheduler, self)
        self._instances: dict[str, SimulatedInstance] = {}
        self._past: list[SimulatedInstance] = []
        self._jobs: dict[str, Job] = {}
        self._turns: dict[str, deque[int]] = defaultdict(deque)  # requests of a session that wait for the one before
        self._talking: set[str] = set()
        self._attempts: dict[int, int] = {}
        self._sent: dict[int, float] = {}  # a turn is sent when the answer before it is there
        self._ttft: dict[int, float] = {}
        self._jct: dict[int, float] = {}
        self._cached_tokens = 0
        self._prefilled_tokens = 0
        self._retried = 0
        self._moved_bytes = 0

    def run(self) -> SimulationReport:
        """Play the trace to its end, or to the horizon."""
        self._control.begin()
        self.agenda.each([request.arrival_s for request in self.trace.requests], self._arrive)
        horizon = self.config.horizon_s
        total = len(self.trace.requests)

        def over() -> bool:
            return len(self._jct) == total or (horizon is not None and self.agenda.now >= horizon)

        # A run makes no reference cycles, but millions of objects that the collector would walk again and again.
        collecting = gc.isenabled()
        gc.disable()
        try:
            events = self.agenda.run(over)
        finally:
            if collecting:
                gc.enable()
        return self._report(events)

    # --- requests ----------------------------------------------------------------------------------------

    def _arrive(self, number: int) -> None:
        session = self.trace.requests[number].session
        if session is not None:
            if session in self._talking:
                self._turns[session].append(number)
                return
            self._talking.add(session)
        self._place(number)

    def _place(self, number: int) -> None:
        request = self.trace.requests[number]
        attempt = self._attempts[number] = self._attempts.get(number, 0) + 1
        self._sent.setdefault(number, self.agenda.now)
        request_id = f"{number}.{attempt}"
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
        job = self._jobs[request_id] = Job(number, request, route)
        if route.replicate is not None:
            self._replicate(request, route.replicate)
        self._instances[route.prefill].prefill(job)

    # --- what instances tell (Outcomes) ------------------------------------------------------------------

    def fetch(self, job: Job) -> tuple[int, float]:
        """Tokens that could be pulled, and the time that took."""
        wanted = job.route.fetch
        source = None if wanted is None else self._instances.get(wanted.source)
        if wanted is None or source is None or not source.alive:
            return 0, 0.0
        blocks = wanted.tokens // self.trace.block_tokens
        held = source.cache.match(job.request, blocks)
        missing = held - self._instances[job.route.prefill].cache.match(job.request, held)
        if missing <= 0:
            return 0, 0.0
        return held * self.trace.block_tokens, self._send(source, missing * self.trace.block_tokens) - self.agenda.now

    def prefill_done(self, job: Job) -> None:
        request = job.request
        self._ttft.setdefault(job.number, self.agenda.now - self._sent[job.number])
        self._cached_tokens += job.cached_tokens
        self._prefilled_tokens += request.num_tokens
        at = self._instances[job.route.prefill]
        if self.config.flow.prefill_keeps:
            at.keep(request, len(request.keys))
        self.scheduler.prefilled(job.route.request_id)
        if request.output_tokens == 1:
            self._finish(job)
        elif job.route.decode is None:
            at.decode(job)
        else:
            self._hand_over(job, at, self._instances[job.route.decode])

    def decode_done(self, job: Job) -> None:
        self._finish(job)

    def evicted(self, name: str, keys: UInt64Array) -> None:
        if self.config.tells_evictions:
            self._control.send(self._told_eviction, name, keys)

    # --- the way of a request ----------------------------------------------------------------------------

    def _hand_over(self, job: Job, source: SimulatedInstance, target: SimulatedInstance) -> None:
        tokens = job.request.num_tokens
        if self.config.flow.decode_keeps:
            tokens -= target.cache.match(job.request, len(job.request.keys)) * self.trace.block_tokens
        self.agenda.at(self._send(source, tokens), self._handed_over, job, source, target)

    def _handed_over(self, job: Job, source: SimulatedInstance, target: SimulatedInstance) -> None:
        if job.over:
            return
        if not target.alive:
            return  # the membership will find out
        if source.alive:
            target.decode(job)
        else:  # the pull failed: its lease tells before the membership does
            self.scheduler.failed(job.route.request_id)
            self.lost([job.route.request_id])

    def _finish(self, job: Job) -> None:
        request, route = job.request, job.route
        del self._jobs[route.request_id]
        job.over = True
        self._jct[job.number] = self.agenda.now - self._sent[job.number]
        if self._answered is not None:
            self._answered()
        flow = self.config.flow
        at = self._instances[route.prefill if route.decode is None else route.decode]
        if route.decode is not None:
            keeps = flow.decode_keeps
        else:  # the prompt was kept when it was prefilled
            keeps = flow.prefill_keeps and len(request.answer_keys) > len(request.keys)
        if keeps:
            at.keep(request, len(request.answer_keys))
        if route.decode is not None and self._returns:
            back = self._instances.get(route.prefill)
            if back is not None and back.alive:
                self.agenda.at(self._send(at, request.output_tokens), self._returned, back, request)
        self.scheduler.finished_keys(route.request_id, request.answer_keys)
        if request.session is not None:
            waiting = self._turns[request.session]
            if waiting:
                self._place(waiting.popleft())
            else:
                self._talking.discard(request.session)

    def _returned(self, at: SimulatedInstance, request: TraceRequest) -> None:
        if at.alive:
            at.keep(request, len(request.answer_keys))

    def _replicate(self, request: TraceRequest, wanted: Replication) -> None:
        source, target = self._instances[wanted.source], self._instances[wanted.target]
        blocks = wanted.tokens // self.trace.block_tokens
        if source.alive:
            self.agenda.at(self._send(source, wanted.tokens), self._replicated, target, request, blocks)

    def _replicated(self, target: SimulatedInstance, request: TraceRequest, blocks: int) -> None:
        if target.alive and target.name in self.scheduler.fleet.slots:
            target.keep(request, blocks)
            self.scheduler.holdings.learned(target.name, request.keys[:blocks], Source.RESPONSE)

    def _send(self, source: SimulatedInstance, tokens: int) -> float:
        nbytes = max(tokens, 0) * self.config.device.kv_bytes_per_token
        self._moved_bytes += nbytes
        return source.send_s(nbytes, -(-tokens // self.trace.block_tokens))

    def _told_eviction(self, name: str, keys: UInt64Array) -> None:
        if name in self.scheduler.fleet.slots:
            self.scheduler.holdings.taken_back(name, keys)

    # --- instances ---------------------------------------------------------------------------------------

    def begin_life(self, name: str) -> None:
        """A new life of this instance, empty. What its last life had in hand comes back by the membership."""
        old = self._instances.get(name)
        if old is not None:
            self._past.append(old)
        group = self._groups[name]
        self._instances[name] = SimulatedInstance(
            name, group, self.config.device, self.agenda, self, self.trace.block_tokens
        )

    def end_life(self, name: str) -> None:
        """Silently: what is sent to it is lost until its lease has run out."""
        self._instances[name].die()

    def lost(self, request_ids: Iterable[str]) -> None:
        """Their instances are gone: make each again."""
        for request_id in request_ids:
            job = self._jobs.pop(request_id)
            job.over = True
            self._retried += 1
            self._place(job.number)

    def _report(self, events: int) -> SimulationReport:
        busy: dict[str, float] = defaultdict(float)
        for instance in (*self._past, *self._instances.values()):
            if instance.group.role is not Role.DECODE:
                busy[instance.name] += instance.busy_s
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
            moved_bytes=self._moved_bytes,
            simulated_s=self.agenda.now,
            events=events,
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
