"""How long prompts and decode steps take on an engine and a pool of their own. For calibration and benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from types import TracebackType

import numpy as np

from poolweave.errors import ConfigError
from poolweave.mempool import Blocks, MemPool, PoolConfig
from poolweave.serving.engine.config import EngineConfig
from poolweave.serving.engine.engine import TorchEngine
from poolweave.serving.engine.models import LoadedModel
from poolweave.serving.engine.sequence import SamplingParams, Sequence
from poolweave.types import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePoint:
    """`batch` prompts of `prompt_tokens` at once, of each the first `cached_tokens` held in `tier`.

    Only whole blocks are reused, and at least one token is computed.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    batch: int = 1
    tier: Tier = Tier.HBM

    @classmethod
    def at_ratio(cls, prompt_tokens: int, ratio: float, block_tokens: int, **others: object) -> ProbePoint:
        """As much of `ratio` as whole blocks can be."""
        cached = min(round(prompt_tokens * ratio), prompt_tokens - 1) // block_tokens * block_tokens
        return cls(prompt_tokens=prompt_tokens, cached_tokens=cached, **others)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRoom:
    """What a probe has room for: at most `batch` prompts of `max_tokens` at once; with `dram`, history goes there."""

    max_tokens: int
    batch: int = 1
    dram: bool = False


class EngineProbe:
    """Owns `pool` and `engine`; a context manager. Its prompts are random tokens; their history is really computed.

    `clock` says what the time is, in seconds. Raises ConfigError for prompts beyond the model's positions.
    """

    def __init__(
        self,
        model: LoadedModel,
        room: ProbeRoom,
        config: EngineConfig | None = None,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 1 < room.max_tokens < model.max_positions:
            raise ConfigError(
                f"prompts of {room.max_tokens} tokens: the model has {model.max_positions} positions, and an answer "
                "needs one of them; ask for shorter prompts",
                setting="prompt_tokens",
                value=room.max_tokens,
                limit=model.max_positions - 1,
            )
        self._clock = clock
        self._random = np.random.default_rng(seed)
        self._words = int(model.model.config.get_text_config().vocab_size)
        self._names = count()
        self._history = self._random.integers(self._words, size=(room.batch, room.max_tokens))
        self._computed = [0] * room.batch
        blocks = 2 * room.batch * (model.layout.num_blocks(room.max_tokens) + 1)  # history, and as much beside it
        size = blocks * model.layout.block_bytes
        settings = PoolConfig(max_hbm=size)
        self.pool = MemPool(model.layout, hbm=size, dram=size if room.dram else 0, config=settings)
        try:
            self.engine = TorchEngine(model, self.pool, config)
        except BaseException:
            self.pool.close()
            raise

    def __enter__(self) -> EngineProbe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close()
        self.pool.close()

    def first_tokens_s(self, point: ProbePoint) -> list[float]:
        """From the prompts' arrival to the first token of each, in their order: the match in the index, bringing blocks
        from DRAM, and the forwards."""
        prompts = [self._prompt(number, point) for number in range(point.batch)]
        if point.tier is Tier.DRAM:
            self.pool.swap_out(self.pool.stats().tiers[Tier.HBM].total)
        began = self._clock()
        sequences = [self._arrive(prompt, max_new_tokens=1) for prompt in prompts]
        seconds = {}
        while self.engine.has_work:
            for emitted in self.engine.step():
                seconds[emitted.request_id] = self._clock() - began
        self._leave(sequences)
        return [seconds[sequence.request_id] for sequence in sequences]

    def decode_step_s(self, num_sequences: int, context_tokens: int, steps: int = 4) -> tuple[float, int]:
        """Seconds of the quickest of `steps` decode steps of `num_sequences` contexts, and the tokens attended to."""
        point = ProbePoint(prompt_tokens=context_tokens + 1, cached_tokens=context_tokens, batch=num_sequences)
        prompts = [self._prompt(number, point) for number in range(num_sequences)]
        sequences = [self._arrive(prompt, max_new_tokens=steps + 1) for prompt in prompts]
        self.engine.step()
        seconds = []
        while self.engine.has_work:
            began = self._clock()
            self.engine.step()
            seconds.append(self._clock() - began)
        self._leave(sequences)
        return min(seconds), num_sequences * (context_tokens + 1 + steps // 2)

    def _prompt(self, number: int, point: ProbePoint) -> list[int]:
        """Random but for its cached part, which is made history first."""
        cached = self._history[number, : point.cached_tokens].tolist()
        if self._computed[number] < point.cached_tokens:
            sequence = self._arrive(cached, max_new_tokens=1)
            while self.engine.has_work:
                self.engine.step()
            self.pool.seal(sequence.blocks)
            self.pool.insert(cached, sequence.blocks)
            self._leave([sequence])
            self._computed[number] = point.cached_tokens
        new = self._random.integers(self._words, size=point.prompt_tokens - point.cached_tokens)
        return [*cached, *new.tolist()]

    def _arrive(self, prompt: list[int], *, max_new_tokens: int) -> Sequence:
        """As at an instance: matched, then queued."""
        block_tokens = self.pool.layout.block_tokens
        with self.pool.match(prompt[: (len(prompt) - 1) // block_tokens * block_tokens]) as hit:
            blocks = hit.take()
        sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        sequence = Sequence(
            request_id=str(next(self._names)), tokens=prompt, sampling=sampling, blocks=blocks,
            num_computed=len(blocks) * block_tokens,
        )  # fmt: skip
        self.engine.add(sequence)
        return sequence

    def _leave(self, sequences: list[Sequence]) -> None:
        """Their blocks go; what was indexed of them stays."""
        for sequence in sequences:
            if sequence.error is not None:
                raise sequence.error
            self.pool.free(sequence.blocks)
            sequence.blocks = Blocks.empty()


def with_block_tokens(model: LoadedModel, block_tokens: int) -> LoadedModel:
    """The same weights over blocks of another size."""
    return replace(model, layout=replace(model.layout, block_tokens=block_tokens))
