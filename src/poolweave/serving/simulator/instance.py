"""One simulated instance: a prefill queue, a decode batch and a cache. Takes time instead of computing.

Prefills run one after the other, first come first served. All sequences of the decode batch advance together, one
token a step; the step's time follows the batch. A colocated instance stops decoding while it prefills.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from poolweave.index.radix import RadixIndex
from poolweave.scheduler.routes import Route
from poolweave.serving.simulator.agenda import Agenda
from poolweave.serving.simulator.config import Device, InstanceGroup
from poolweave.serving.simulator.traces import TraceRequest
from poolweave.types import Role, UInt64Array


@dataclass(slots=True, eq=False)
class Job:
    """One attempt at a request."""

    number: int
    request: TraceRequest
    route: Route
    cached_tokens: int = 0
    over: bool = False  # given up: its later events mean nothing


class Outcomes(Protocol):
    """What an instance tells the simulation."""

    def fetch(self, job: Job) -> tuple[int, float]: ...
    def prefill_done(self, job: Job) -> None: ...
    def decode_done(self, job: Job) -> None: ...
    def evicted(self, name: str, keys: UInt64Array) -> None: ...


class BlockCache:
    """Historical KV under a cap: the index of a real instance, with the halves of block keys for tokens."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._index = RadixIndex(block_tokens=2)
        self._used = 0

    def match(self, request: TraceRequest, num_blocks: int) -> int:
        """How many of the request's first blocks are held."""
        return self._index.match(request.cache_tokens[: 2 * num_blocks]).num_tokens // 2

    def insert(self, request: TraceRequest, num_blocks: int) -> UInt64Array:
        """Keep the request's first blocks, as far as there is room. Returns the keys given up for them."""
        keys = request.answer_keys[: min(num_blocks, self._capacity)]
        if not len(keys):
            return keys
        inserted = self._index.insert(request.cache_tokens[: 2 * len(keys)], keys)
        self._used += len(keys) - len(inserted.duplicates)
        if self._used <= self._capacity:
            return keys[:0]
        gone = self._index.evict(self._used - self._capacity)
        self._used -= len(gone)
        return gone


@dataclass(slots=True, eq=False)
class _Batch:
    """A decode batch: `progress` tokens have been given to each sequence that was there all the time."""

    progress: float = 0.0
    since: float = 0.0
    kv_tokens: int = 0  # reserved, to the end of each answer
    context_tokens: int = 0  # attended over, on average
    running: list[tuple[float, int, Job]] = field(default_factory=list)  # by the progress at which they end
    waiting: deque[Job] = field(default_factory=deque)
    version: int = 0  # of the planned end
    step_s: float = 0.0  # of `running` as it is; 0.0: not known


class SimulatedInstance:
    """See the module. `life` ends at death: a new object takes the name."""

    def __init__(
        self, name: str, group: InstanceGroup, device: Device, agenda: Agenda, outcomes: Outcomes, block_tokens: int
    ) -> None:
        self.name = name
        self.group = group
        self.alive = True
        self.cache = BlockCache(group.cache_tokens // block_tokens)
        self.busy_s = 0.0
        self.computed_tokens = 0
        self._device = device
        self._agenda = agenda
        self._outcomes = outcomes
        self._block_tokens = block_tokens
        self._queue: deque[Job] = deque()
        self._prefilling: Job | None = None
        self._pauses = group.role is Role.COLOCATED  # its decode, while it prefills
        self._batch = _Batch()
        self._link_free_s = 0.0

    def die(self) -> None:
        """Nothing that was planned here happens any more."""
        self.alive = False

    def keep(self, request: TraceRequest, num_blocks: int) -> None:
        """Add the request's first blocks to the cache, and tell what went for them."""
        gone = self.cache.insert(request, num_blocks)
        if len(gone):
            self._outcomes.evicted(self.name, gone)

    # --- prefill -----------------------------------------------------------------------------------------

    def prefill(self, job: Job) -> None:
        """Queue a prompt."""
        self._queue.append(job)
        if self._prefilling is None:
            self._next_prefill()

    def _next_prefill(self) -> None:
        while self._queue and self._queue[0].over:
            self._queue.popleft()
        self._advance()
        job = self._prefilling = self._queue.popleft() if self._queue else None
        self._plan_end()
        if job is None:
            return
        tokens = job.request.num_tokens
        fetched_tokens, fetch_s = (0, 0.0) if job.route.fetch is None else self._outcomes.fetch(job)
        held = self.cache.match(job.request, (tokens - 1) // self._block_tokens)
        job.cached_tokens = max(held * self._block_tokens, fetched_tokens)
        seconds = self._device.model.prefill_s(tokens, job.cached_tokens) * self.group.slowness
        self.busy_s += seconds
        self.computed_tokens += tokens - job.cached_tokens
        self._agenda.after(fetch_s + seconds, self._prefilled, job)

    def _prefilled(self, job: Job) -> None:
        if not self.alive:
            return
        if not job.over:
            self._outcomes.prefill_done(job)
        self._next_prefill()

    def send_s(self, nbytes: int, calls: int) -> float:
        """When a transfer of this size from here is over: one after the other."""
        start = max(self._agenda.now, self._link_free_s)
        self._link_free_s = start + self._device.link.seconds(nbytes, calls)
        return self._link_free_s

    # --- decode ------------------------------------------------------------------------------------------

    def decode(self, job: Job) -> None:
        """Add a sequence to the batch, or to those that wait for KV memory."""
        self._batch.waiting.append(job)
        self._advance()
        self._admit()
        self._plan_end()

    def _step_s(self) -> float:
        batch = self._batch
        seconds = self._device.model.decode_step_s(len(batch.running), batch.context_tokens)
        batch.step_s = seconds * self.group.slowness
        return batch.step_s

    def _advance(self) -> None:
        """Bring `progress` up to now."""
        batch, now = self._batch, self._agenda.now
        if batch.running and not (self._pauses and self._prefilling is not None):
            batch.progress += (now - batch.since) / (batch.step_s or self._step_s())
        batch.since = now

    def _admit(self) -> None:
        batch = self._batch
        while batch.waiting:
            job = batch.waiting[0]
            needed = job.request.num_tokens + job.request.output_tokens
            if not job.over and batch.running and batch.kv_tokens + needed > self.group.kv_tokens:
                return
            batch.waiting.popleft()
            if job.over:
                continue
            batch.step_s = 0.0
            batch.kv_tokens += needed
            batch.context_tokens += _context(job)
            # The first token came with the prefill.
            heapq.heappush(batch.running, (batch.progress + job.request.output_tokens - 1, job.number, job))

    def _plan_end(self) -> None:
        batch = self._batch
        batch.version += 1
        if batch.running and not (self._pauses and self._prefilling is not None):
            seconds = max(batch.running[0][0] - batch.progress, 0.0) * (batch.step_s or self._step_s())
            self._agenda.after(seconds, self._decoded, batch.version)

    def _decoded(self, version: int) -> None:
        if not self.alive or version != self._batch.version:
            return
        self._advance()
        batch = self._batch
        batch.progress = max(batch.progress, batch.running[0][0])  # the planned end, free of rounding
        batch.step_s = 0.0
        while batch.running and batch.running[0][0] <= batch.progress:
            _, _, job = heapq.heappop(batch.running)
            batch.kv_tokens -= job.request.num_tokens + job.request.output_tokens
            batch.context_tokens -= _context(job)
            if not job.over:
                self._outcomes.decode_done(job)
        self._admit()
        self._plan_end()


def _context(job: Job) -> int:
    return job.request.num_tokens + job.request.output_tokens // 2
