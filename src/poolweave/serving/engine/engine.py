"""TorchEngine: one ragged forward a step over sequences whose KV lies in a pool's blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from poolweave.errors import InstanceClosed, LayoutMismatch, NotFinite, PoolweaveError, RequestRefused
from poolweave.mempool import MemPool
from poolweave.serving.engine.admission import refuse_impossible
from poolweave.serving.engine.attention import PoolCache, StepUnwanted
from poolweave.serving.engine.batch import Batch, Row
from poolweave.serving.engine.batcher import Batcher, Chunk
from poolweave.serving.engine.config import EngineConfig
from poolweave.serving.engine.hooks import HookCall
from poolweave.serving.engine.models import LoadedModel
from poolweave.serving.engine.planes import KVPlanes
from poolweave.serving.engine.sampler import sample
from poolweave.serving.engine.sequence import Emitted, FinishReason, Sequence
from poolweave.serving.engine.stopping import Ending
from poolweave.types import Tier

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What is queued now, and counters since the start."""

    running: int
    waiting: int
    steps: int
    computed_tokens: int
    emitted_tokens: int
    preemptions: int


class TorchEngine:
    """Runs an unmodified model with continuous batching; KV is written to and read from the pool's blocks only.

    One thread drives `add` and `step`; `cancel` may come from any. Blocks belong to the sequences' owner (see
    Sequence). Raises LayoutMismatch when the pool's blocks cannot hold this model's KV.
    """

    def __init__(self, model: LoadedModel, pool: MemPool, config: EngineConfig | None = None) -> None:
        ours, theirs = model.layout.fingerprint(), pool.layout.fingerprint()
        if ours != theirs:
            raise LayoutMismatch(f"the model's KV is {ours}, the pool's blocks hold {theirs}", ours=ours, theirs=theirs)
        config = config or EngineConfig()
        torch.set_num_threads(config.num_threads)
        self._model = model
        self._pool = pool
        self._planes = KVPlanes(pool.view(Tier.HBM), pool.layout)
        self._batcher = Batcher(pool, config)
        self._sequences: dict[str, Sequence] = {}
        self._endings: dict[str, Ending] = {}
        self._closed = False
        self._stalled = False
        self._steps = self._computed_tokens = self._emitted_tokens = 0

    @property
    def has_work(self) -> bool:
        """Some request has not ended."""
        return bool(self._sequences)

    @property
    def stalled(self) -> bool:
        """The last step found no blocks for anyone: step again when others have freed some, not at once."""
        return self._stalled

    def add(self, sequence: Sequence) -> None:
        """Queue a request.

        Raises RequestRefused when it can never run here, StaleHandle or UnknownBlock for blocks that its owner does not
        hold, InstanceClosed; then nothing is kept.
        """
        self._check_open()
        if sequence.request_id in self._sequences:
            raise RequestRefused(f"request {sequence.request_id} is already here")
        refuse_impossible(sequence, self._model, self._pool)
        model = self._model
        self._endings[sequence.request_id] = Ending(
            sequence, eos=model.eos_token_ids, max_positions=model.max_positions, tokenizer=model.tokenizer
        )
        self._sequences[sequence.request_id] = sequence
        self._batcher.add(sequence)

    def cancel(self, request_id: str) -> bool:
        """Ask a request to end; the next step emits its end. False when it is not here. Any thread."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        sequence.cancelled = True
        return True

    def step(self) -> list[Emitted]:
        """Compute one batch: at most one new token a request. Empty when there is no work, no memory or only prefill.

        An error of the forward itself is raised as it is; the sequences stay as they were before the step.
        """
        self._check_open()
        emitted = [self._finish(s, "cancelled") for s in list(self._sequences.values()) if s.cancelled]
        plan = self._batcher.plan()
        emitted += [self._fail(sequence, error) for sequence, error in plan.failed]
        chunks = list(plan.chunks.values())
        self._stalled = not chunks and self.has_work
        return emitted + self._run(chunks) if chunks else emitted

    def stats(self) -> EngineStats:
        """A snapshot."""
        return EngineStats(
            running=len(self._batcher.running),
            waiting=len(self._batcher.waiting),
            steps=self._steps,
            computed_tokens=self._computed_tokens,
            emitted_tokens=self._emitted_tokens,
            preemptions=self._batcher.num_preempted,
        )

    def check(self) -> None:
        """Assert all invariants; for tests."""
        self._batcher.check()
        queued = [s.request_id for s in (*self._batcher.running, *self._batcher.waiting)]
        assert sorted(queued) == sorted(self._sequences) == sorted(self._endings)

    def close(self) -> None:
        """End all requests as cancelled; their blocks stay their owners'. Idempotent."""
        if self._closed:
            return
        for sequence in list(self._sequences.values()):
            self._finish(sequence, "cancelled")
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise InstanceClosed("this engine is closed")

    def _run(self, chunks: list[Chunk]) -> list[Emitted]:
        """The forward, then one token for each sequence all of whose tokens are now computed."""
        ready = [index for index, chunk in enumerate(chunks) if chunk.num_tokens == chunk.sequence.num_pending]
        batch = self._batch(chunks)
        try:
            logits = self._forward(batch, ready, lambda: all(chunk.sequence.cancelled for chunk in chunks))
        except StepUnwanted:
            return []  # the next step tells that they ended
        failed = {call.request_id: call.error for call in batch.hooks if call.error is not None}
        for chunk in chunks:
            if chunk.sequence.request_id not in failed:
                chunk.sequence.num_computed += chunk.num_tokens
                self._computed_tokens += chunk.num_tokens
        self._steps += 1
        whole = [row for row, index in enumerate(ready) if chunks[index].sequence.request_id not in failed]
        sequences = [chunks[ready[row]].sequence for row in whole]
        emitted = [self._fail(self._sequences[request_id], error) for request_id, error in failed.items()]
        tokens = sample(logits if len(whole) == len(ready) else logits[whole], sequences)
        return emitted + [self._emit(s, token) for s, token in zip(sequences, tokens, strict=True)]

    def _batch(self, chunks: Iterable[Chunk]) -> Batch:
        rows, hooks, block_tokens = [], [], self._pool.layout.block_tokens
        tails: list[tuple[int, int]] = []  # slot, first unwritten token
        for chunk in chunks:
            sequence, start = chunk.sequence, chunk.sequence.num_computed
            end = start + chunk.num_tokens
            slots = self._pool.slots(sequence.blocks[: self._pool.layout.num_blocks(end)])
            rows.append(Row(sequence.tokens[start:end], start, slots))
            if sequence.hook is not None:
                hooks.append(HookCall(sequence.request_id, sequence.hook, end))
            begins_block = (
                chunk.first or start % block_tokens == 0 or start // block_tokens != (end - 1) // block_tokens
            )
            if begins_block and end % block_tokens:
                tails.append((int(slots[-1]), end % block_tokens))
        if tails:
            self._planes.zero_tails(*np.array(tails, dtype=np.int64).T)
        return Batch(rows, self._planes, hooks)

    def _forward(self, batch: Batch, ready: list[int], unwanted: Callable[[], bool]) -> torch.Tensor:
        """Logits [len(ready), vocab] after the last token of the rows `ready`. Raises StepUnwanted."""
        with torch.inference_mode():
            result = self._model.model(
                input_ids=batch.input_ids,
                position_ids=batch.positions,
                cache=PoolCache(batch, unwanted),
                use_cache=True,
                logits_to_keep=batch.last[ready],
            )
        return result.logits[0]

    def _emit(self, sequence: Sequence, token: int | None) -> Emitted:
        if sequence.forced is not None:
            token = sequence.forced[sequence.num_answer]
        if token is None:
            position = len(sequence.tokens)
            message = f"the model computed NaN or infinity for position {position} of request {sequence.request_id}"
            return self._fail(sequence, NotFinite(message, position=position))
        sequence.tokens.append(token)
        self._emitted_tokens += 1
        reason = self._endings[sequence.request_id].after(token)
        if reason is not None:
            self._finish(sequence, reason)
        return Emitted(sequence.request_id, token, reason)

    def _fail(self, sequence: Sequence, error: PoolweaveError) -> Emitted:
        _log.warning("request %s failed: %s", sequence.request_id, error)
        sequence.error = error
        return self._finish(sequence, "error")

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Emitted:
        sequence.finish_reason = reason
        self._batcher.remove(sequence)
        del self._sequences[sequence.request_id], self._endings[sequence.request_id]
        return Emitted(sequence.request_id, None, reason)
