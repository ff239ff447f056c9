"""The scheduler's side: what a request finds in the pool, what each step loads and saves, and when it is history.

Only whole blocks move. A step owns what it reads and writes until its report comes, so neither an abort nor a
preemption can free memory that a worker still touches. Called by vLLM's scheduler, from one thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from poolweave.errors import OutOfBlocks
from poolweave.index import Identity
from poolweave.integrations.vllm.identity import request_identity
from poolweave.integrations.vllm.step_plan import Copies, StepPlan, StepReport
from poolweave.integrations.vllm.track import Step, Track, Write
from poolweave.integrations.vllm.traffic import Traffic
from poolweave.mempool import Blocks, MemPool
from poolweave.types import Int32Array

logger = logging.getLogger(__name__)

_IDLE_S = 2e-4  # a step that computes nothing lets those threads run that bring what it waits for; vLLM's loop may spin


class SchedulerSide:
    """`base` is the identity of the engine's KV. `counters` counts blocks: loaded, saved, spoilt (of failed steps),
    skipped (no room in the pool).
    """

    def __init__(self, pool: MemPool, base: Identity, traffic: Traffic) -> None:
        self.pool = pool
        self.base = base
        self.counters: Counter[str] = Counter()
        self._traffic = traffic
        self._window = pool.window()
        self._block_tokens = pool.layout.block_tokens
        self._tracks: dict[str, Track] = {}
        self._steps: dict[int, Step] = {}
        self._last_step = 0
        self._loading = Step()  # of the next plan
        self._loads: list[Copies] = []

    def lookup(self, request: Any, local: int) -> int | None:
        """Tokens beyond `local` that the pool has for it; None: KV is on its way here, ask again.

        At least one token is left to compute. What is found stays pinned until the request ends or asks again.
        """
        if request.prompt_token_ids is None or request.pooling_params is not None:
            return 0
        track = self._tracks.get(request.request_id)
        if track is None:
            track = Track(request, self.pool.namespace(request_identity(self.base, request)))
            self._tracks[request.request_id] = track
        self._start_over(track)
        tokens = track.tokens()
        prefix = tokens[: (len(tokens) - 1) // self._block_tokens * self._block_tokens]
        track.local = local
        if not self._traffic.settled(track, prefix, local):
            return None
        hit = self.pool.match(prefix, track.ns)
        self._traffic.claimed(track)
        track.held = hit.take()
        track.planned = len(track.held)
        return max(0, hit.num_tokens - local)

    def allocated(self, request: Any, pages: Sequence[int], external: int) -> None:
        """`pages` are the request's blocks in vLLM's cache; the next step loads `external` tokens into them."""
        if external <= 0:
            return
        track = self._tracks[request.request_id]
        first, end = track.local // self._block_tokens, (track.local + external) // self._block_tokens
        blocks = track.held[first:end]
        self.pool.retain(blocks)
        self._loading.reads.append(blocks)
        self._loads.append(Copies(np.asarray(pages[first:end], np.int32), self.pool.slots(blocks)))
        self.counters["loaded"] += len(blocks)

    def plan(self, scheduled: Any) -> StepPlan:
        """What the workers do in the step that vLLM's SchedulerOutput describes."""
        if not scheduled.num_scheduled_tokens and self._traffic.waits:
            time.sleep(_IDLE_S)
        step, self._loading = self._loading, Step()
        saves = [self._save(step, *progress, scheduled) for progress in self._progress(scheduled)]
        loads, self._loads = self._loads, []
        saves = [copies for copies in saves if len(copies)]
        if not saves and not loads:
            return StepPlan(self._window)
        self._last_step += 1
        self._steps[self._last_step] = step
        progress = self._traffic.watch(self._last_step, step.writes)
        return StepPlan(self._window, self._last_step, _joined(loads), _joined(saves), progress)

    def settle(self, report: StepReport) -> None:
        """Steps are over: what they wrote becomes history, unless something that they loaded or wrote had failed."""
        for number in report.steps:
            step = self._steps.pop(number)
            if number in report.failed:
                for later in self._steps.values():
                    later.late = True
            for blocks in step.reads:
                self.pool.free(blocks)
            for write in step.writes:
                self._keep(write, good=not step.late and number not in report.failed)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """The request has ended, by itself or aborted. -> what the answer says of its KV, for another engine"""
        track = self._tracks.pop(request.request_id, None)
        if track is None:
            self._traffic.refuse(request)
            return None
        track.done = True
        told = self._traffic.announce(track)
        if not track.pending:
            self._retire(track)
        return told

    def forget(self) -> None:
        """Nothing computed so far is ever found again, as after new weights were put into the model."""
        revision = f"{self.base.revision}#{secrets.token_hex(8)}"
        self.base = dataclasses.replace(self.base, revision=revision)
        for track in self._tracks.values():
            self._start_over(track)
            track.ns = self.pool.namespace(request_identity(self.base, track.request))
            track.starved = True  # what it goes on with was computed before

    def close(self) -> None:
        """End all requests, traffic and the pool. Idempotent."""
        for step in self._steps.values():
            for blocks in (*step.reads, *(write.blocks for write in step.writes)):
                self.pool.free(blocks)
        self._steps.clear()
        for track in self._tracks.values():
            self._traffic.abandoned(track)
            self._start_over(track)
        self._tracks.clear()
        self._traffic.close()
        self.pool.close()

    def _progress(self, scheduled: Any) -> Iterator[tuple[str, int]]:
        """Requests of the step, and how many tokens each has computed after it."""
        counts = scheduled.num_scheduled_tokens
        for new in scheduled.scheduled_new_reqs:
            yield new.req_id, new.num_computed_tokens + counts[new.req_id]
        cached = scheduled.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            yield name, computed + counts[name]

    def _save(self, step: Step, name: str, computed: int, scheduled: Any) -> Copies:
        """The whole blocks that this step completes."""
        track = self._tracks.get(name)
        if track is None or track.starved or computed // self._block_tokens <= track.planned:
            return Copies()
        first, end = track.planned, computed // self._block_tokens
        try:
            blocks = self._room(track, first, end)
        except OutOfBlocks:
            track.starved = True
            self.counters["skipped"] += end - first
            return Copies()
        pages = scheduled.kv_connector_block_state.get_block_ids(name)[0][first:end]
        step.writes.append(Write(track, track.generation, first, blocks))
        track.planned = end
        track.pending += 1
        return Copies(np.asarray(pages, np.int32), self.pool.slots(blocks))

    def _room(self, track: Track, first: int, end: int) -> Blocks:
        """Blocks [first, end) of the request, to be written. Raises OutOfBlocks."""
        whole = track.request.num_prompt_tokens // self._block_tokens
        if track.receiver is not None and not track.offered and first < whole:
            track.offered = True
            with contextlib.suppress(OutOfBlocks):  # then it goes at the end, as far as there is room
                track.reserved = self.pool.alloc(whole - first, ns=track.ns)
                self._traffic.offer_early(track, self._block_tokens)
        blocks = track.reserved[: end - first]
        if len(blocks) < end - first:
            blocks = blocks + self.pool.alloc(end - first - len(blocks), ns=track.ns)
        track.reserved = track.reserved[end - first :]
        return blocks

    def _keep(self, write: Write, *, good: bool) -> None:
        track = write.track
        track.pending -= 1
        tokens, count = track.tokens(), 0
        current = write.generation == track.generation
        if current:
            self._traffic.written(track, write.first)
        if good and current and write.first == len(track.held):  # else a block before it is missing
            count = max(0, min(len(write.blocks), len(tokens) // self._block_tokens - write.first))
        if count:
            kept = write.blocks[:count]
            self.pool.seal(kept)
            track.held = track.held + kept
            self.pool.insert(tokens[: len(track.held) * self._block_tokens], track.held, track.ns)
            self.counters["saved"] += count
            self._traffic.good(track)
        if count < len(write.blocks):
            if current:
                self._withdraw(track)
            self.pool.free(write.blocks[count:])
            self.counters["spoilt"] += len(write.blocks) - count
            if current:
                track.planned = len(track.held)
        if track.done and not track.pending:
            self._retire(track)

    def _withdraw(self, track: Track) -> None:
        """What it computes goes nowhere before its end."""
        self._traffic.drop_early(track)
        reserved, track.reserved = track.reserved, Blocks.empty()
        if len(reserved):
            self.pool.free(reserved)

    def _start_over(self, track: Track) -> None:
        self._withdraw(track)
        track.offered = False
        held, track.held = track.held, Blocks.empty()
        if len(held):
            self.pool.free(held)
        track.planned = 0
        track.generation += 1
        track.starved = False

    def _retire(self, track: Track) -> None:
        self._traffic.ship(track, self._block_tokens)
        self._traffic.abandoned(track)
        self._start_over(track)


def _joined(copies: Sequence[Copies]) -> Copies:
    if len(copies) == 1:
        return copies[0]
    if not copies:
        return Copies()
    pages: list[Int32Array] = [part.pages for part in copies]
    return Copies(np.concatenate(pages), np.concatenate([part.rows for part in copies]))
