"""A DecodeEngine as an instance's engine: sequences whose KV came into a pool go to the workers, and their KV back.

    pool (received) -> the engine's KV pool -> decoded there -> pool (written behind what was received) -> sent back

One thread adds and steps, any cancels.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from poolweave.crosspool_engine import BroughtKv, DecodeEngine, DecodeRequest
from poolweave.crosspool_engine import Emitted as News
from poolweave.crosspool_engine.request import MAX_STOPS
from poolweave.errors import OutOfBlocks
from poolweave.mempool import MemPool
from poolweave.serving.crosspool.cold_model import ColdModel
from poolweave.serving.engine.admission import refuse_impossible
from poolweave.serving.engine.sequence import Emitted, FinishReason, Sequence
from poolweave.serving.engine.stopping import Ending
from poolweave.types import Tier

_log = logging.getLogger(__name__)

_WAIT_S = 0.02  # for a token; then what else has begun is looked for


@dataclass(slots=True, eq=False)
class _Decoding:
    sequence: Sequence
    ending: Ending
    over: FinishReason | None = None  # ended here, while the workers may be a token further


class Decoder:
    """`models` and `pools` by name. Workers that died are replaced before the next request runs."""

    def __init__(self, engine: DecodeEngine, models: Mapping[str, ColdModel], pools: Mapping[str, MemPool]) -> None:
        self._engine = engine
        self._models = models
        self._pools = pools
        self._running: dict[str, _Decoding] = {}
        self._restarts = 0
        self.figures: dict[str, Any] = {}
        self._count()

    @property
    def stalled(self) -> bool:
        """Never: a step waits by itself."""
        return False

    def add(self, sequence: Sequence) -> None:
        """Take over a sequence. Raises RequestRefused, Overloaded, NotResident, WorkerLost; then nothing is kept."""
        model, pool = self._models[sequence.model], self._pools[sequence.model]
        refuse_impossible(sequence, model, pool)
        ending = Ending(sequence, eos=model.eos_token_ids, max_positions=model.max_positions, tokenizer=model.tokenizer)
        self._revive()
        self._engine.add(_request(sequence, model, pool))
        self._running[sequence.request_id] = _Decoding(sequence, ending)

    def cancel(self, request_id: str) -> bool:
        """Ask a request to end; a step tells its end. False when it is not here."""
        decoding = self._running.get(request_id)
        if decoding is not None:
            decoding.sequence.cancelled = True
        return decoding is not None

    def step(self) -> list[Emitted]:
        """Move on, or wait a little. Raises WorkerLost when workers that died cannot be replaced."""
        for name, decoding in self._running.items():
            if decoding.sequence.cancelled and decoding.over is None:
                decoding.over = "cancelled"
                self._engine.cancel(name)
        told = [self._tell(news) for news in self._engine.step(_WAIT_S)]
        self._revive()
        self._count()
        return [emitted for emitted in told if emitted is not None]

    def _tell(self, news: News) -> Emitted | None:
        """As serving tells it; None for tokens that came after the answer's end."""
        decoding = self._running[news.request_id]
        sequence, token = decoding.sequence, None
        if news.token is not None and decoding.over is None:
            token = news.token
            sequence.tokens.append(token)
            decoding.over = decoding.ending.after(token)
            if decoding.over is not None:
                self._engine.cancel(news.request_id)  # harmless where it ended by itself
        if news.finish_reason is not None:
            self._finish(decoding, news)
        elif token is None:
            return None
        return Emitted(news.request_id, token, sequence.finish_reason)

    def _finish(self, decoding: _Decoding, news: News) -> None:
        sequence = decoding.sequence
        del self._running[news.request_id]
        result = self._engine.result(news.request_id)
        sequence.error = news.error
        sequence.finish_reason = "error" if news.error else decoding.over or news.finish_reason
        if result.kv is not None and sequence.finish_reason in ("stop", "length"):
            self._take_back(sequence, result.kv)

    def _take_back(self, sequence: Sequence, kv: Any) -> None:
        """The KV of all but the last token, from the first block on that was not whole, into the blocks, which grow."""
        pool = self._pools[sequence.model]
        computed = len(sequence.tokens) - 1
        needed = pool.layout.num_blocks(computed)
        try:
            grown = sequence.blocks + pool.alloc(needed - len(sequence.blocks), ns=sequence.ns)
        except OutOfBlocks as error:  # the answer is whole: only the next turn is slower
            _log.warning("the KV of request %s is not kept: %s", sequence.request_id, error)
            return
        first = sequence.num_computed // pool.layout.block_tokens  # before it all is sealed and the same
        sequence.blocks = grown
        pool.view(Tier.HBM)[pool.slots(grown[first:])] = kv[: needed - first]
        sequence.num_computed = computed

    def _revive(self) -> None:
        if self._engine.has_lost_workers:
            self._engine.restart()
            self._restarts += 1
            _log.warning("workers of the decode engine were replaced")

    def _count(self) -> None:
        stats = self._engine.stats()
        self.figures = {"restarts": self._restarts, **msgspec.to_builtins(stats)}


def _request(sequence: Sequence, model: ColdModel, pool: MemPool) -> DecodeRequest:
    sampling = sequence.sampling
    stops = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else model.eos_token_ids))
    room = model.max_positions - len(sequence.tokens)
    kv = BroughtKv(pool.view(Tier.HBM), pool.slots(sequence.blocks)) if sequence.num_computed else None
    return DecodeRequest(
        request_id=sequence.request_id, model=sequence.model, tokens=sequence.tokens, kv=kv,
        num_computed=sequence.num_computed, max_new_tokens=min(room, sampling.max_new_tokens - sequence.num_answer),
        temperature=sampling.temperature, top_p=sampling.top_p, stop_token_ids=stops[:MAX_STOPS], seed=sequence.seed,
        return_kv=True, known_blocks=sequence.num_computed // pool.layout.block_tokens, tenant=sequence.salt,
    )  # fmt: skip
