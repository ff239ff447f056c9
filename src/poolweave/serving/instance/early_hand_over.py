"""A prompt's KV on its way to the decode instance while the prompt is computed: layer by layer, chunk by chunk.

An early hand-over only saves time: whatever goes wrong with it, it ends, and the KV is handed over when all is
computed. Source: MemServe §5.2 (by-layer transfer).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from poolweave.errors import ConfigError, PoolweaveError
from poolweave.mempool import Blocks, MemPool
from poolweave.serving.engine.sequence import Sequence
from poolweave.serving.instance.granularity import HandOverPolicy
from poolweave.transfer import Transfer

_log = logging.getLogger(__name__)


class EarlyHandOver:
    """The LayerHook of one prompt at its prefill instance. Its owner calls take() or abandon() at the end.

    `begin` opens the growing transfer of the prompt's blocks from `sealed.start` on, once they are there; those in
    `sealed` come from the index.
    """

    def __init__(
        self, pool: MemPool, sequence: Sequence, policy: HandOverPolicy, sealed: range, begin: Callable[[], Transfer]
    ) -> None:
        self._pool = pool
        self._sequence = sequence
        self._policy = policy
        self._begin = begin
        self._transfer: Transfer | None = None
        self._over = False
        self._first = sealed.start  # block of the prompt with which the transfer begins
        self._whole = sealed.stop  # leading blocks all of whose layers are sealed
        self._layers = 0  # sealed layers of the blocks of this chunk
        self._step = 1  # layers that go together in this chunk
        self._began = self._told_s = 0.0
        self._num_told = 0

    def written(self, layer: int, num_tokens: int) -> None:
        """Seals what is complete and tells the receiver, in steps of as many layers as the policy says."""
        if self._over:
            return
        try:
            self._advance(layer, num_tokens)
        except PoolweaveError as error:
            _log.warning("request %s is handed over when computed: %s", self._sequence.request_id, error)
            self.abandon()

    def needed(self, layer: int) -> None:
        """All it reads was computed here."""

    def take(self) -> Transfer | None:
        """The transfer of the whole prompt, all of it told; None when there is none and the caller must send it."""
        if self._over or self._transfer is None or self._whole < len(self._prompt_blocks()):
            self.abandon()
            return None
        self._over = True
        return self._transfer

    def abandon(self) -> None:
        """End the transfer, if it goes on. Idempotent."""
        self._over = True
        if self._transfer is not None:
            self._transfer.cancel()
            self._transfer = None

    def _advance(self, layer: int, num_tokens: int) -> None:
        sequence, layout = self._sequence, self._pool.layout
        if sequence.num_preemptions:
            raise ConfigError("its blocks were taken for an older request", setting="hbm")
        last = num_tokens >= sequence.num_prompt
        end = len(self._prompt_blocks()) if last else num_tokens // layout.block_tokens
        if layer == 0:
            self._choose_step(end, last)
        if end <= self._whole or ((layer + 1) % self._step and layer + 1 < layout.num_layers):
            return
        began = time.perf_counter()
        self._pool.seal(sequence.blocks[self._whole : end], range(self._layers, layer + 1))
        self._opened().ready(layer + 1, end - self._first)
        self._layers = layer + 1
        self._told_s, self._num_told = self._told_s + time.perf_counter() - began, self._num_told + 1
        if self._layers == layout.num_layers:
            self._chunk_done(end)

    def _opened(self) -> Transfer:
        """The transfer, begun when there is something to pull: its lease does not run while that is computed."""
        if self._transfer is None:
            self._transfer = self._begin()
            if self._whole > self._first:
                self._transfer.ready(num_blocks=self._whole - self._first)
        return self._transfer

    def _choose_step(self, end: int, last: bool) -> None:
        """At the first layer of a chunk: choose the step. Chunks that others follow go whole: those hide them."""
        if self._transfer is not None and self._transfer.done():
            raise self._transfer.exception() or ConfigError("it was cancelled", setting="growing")
        self._layers, self._began = 0, time.perf_counter()
        self._told_s, self._num_told = 0.0, 0
        count = end - self._whole
        self._step = self._policy.layers_per_step(count) if last else self._pool.layout.num_layers

    def _chunk_done(self, end: int) -> None:
        spent = time.perf_counter() - self._began
        self._policy.observe_chunk(end - self._whole, spent, self._told_s / self._num_told)
        self._whole = end

    def _prompt_blocks(self) -> Blocks:
        return self._sequence.blocks[: self._pool.layout.num_blocks(self._sequence.num_prompt)]
