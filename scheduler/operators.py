"""Operator-level cost model: each operator fitted alone, parallelism as multipliers. Source: MemServe §6.2.

    compute-bound (GEMM)      (eta - 1) * full_wave + last_wave,  eta = ceil(thread blocks / SMs)
    memory-bound attention    a x²y + b x² + c x + d,             x prompt length, y cached ratio
    norms, activations        linear in the new tokens, or constant

TP divides a GEMM's columns and the attention's heads and adds collectives; PP divides the layers among stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, overload

import numpy as np

from poolweave.errors import ConfigError
from poolweave.scheduler.cost_model import Counts, DecodeStep, Floats, decode_of
from poolweave.scheduler.fitting import fit_relative


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Tensor and pipeline parallel ranks of one instance."""

    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1:
            raise ConfigError(f"tp and pp must be at least 1, got {self.tp} and {self.pp}", setting="parallelism")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSample:
    """One measured call at TP 1: `new_tokens` computed of a prompt of `prompt_tokens`."""

    new_tokens: int
    prompt_tokens: int
    seconds: float


class Operator(Protocol):
    """One kernel; `count` calls of it make a forward of the whole model (layers included)."""

    @property
    def count(self) -> int: ...

    def seconds(self, new: Floats, prompt: Floats, parallelism: Parallelism) -> Floats:
        """Time of one call for `new` tokens of prompts of `prompt` tokens, elementwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveOperator:
    """A GEMM: thread blocks of `tile_tokens` rows run in waves over `num_sms` multiprocessors (or cores)."""

    count: int
    tile_tokens: int
    column_blocks: int  # thread blocks side by side over the output columns, at TP 1
    num_sms: int
    full_wave_s: float
    last_wave_s: float

    @classmethod
    def fit(
        cls, samples: Sequence[OperatorSample], *, count: int, tile_tokens: int, column_blocks: int, num_sms: int
    ) -> WaveOperator:
        """The two wave times. Raises ConfigError when all samples have the same number of waves."""
        unfitted = cls(
            count=count,
            tile_tokens=tile_tokens,
            column_blocks=column_blocks,
            num_sms=num_sms,
            full_wave_s=1.0,
            last_wave_s=0.0,
        )
        new = np.array([float(s.new_tokens) for s in samples])
        full_waves = unfitted.waves(new, Parallelism()) - 1
        rows = np.stack([full_waves, np.ones_like(new)], axis=1)
        full, last = fit_relative(rows, np.array([s.seconds for s in samples]), "compute-bound operator")
        return replace(unfitted, full_wave_s=full, last_wave_s=last)

    def waves(self, new: Floats, parallelism: Parallelism) -> Floats:
        columns = -(-self.column_blocks // parallelism.tp)
        return np.ceil(np.ceil(new / self.tile_tokens) * columns / self.num_sms)

    def seconds(self, new: Floats, prompt: Floats, parallelism: Parallelism) -> Floats:
        eta = self.waves(new, parallelism)
        return np.where(eta > 0, (eta - 1) * self.full_wave_s + self.last_wave_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOperator:
    """a x²y + b x² + c x + d; TP divides all but the launch `d`, as each rank has its share of the heads."""

    count: int
    a: float
    b: float
    c: float
    d: float

    @classmethod
    def fit(cls, samples: Sequence[OperatorSample], *, count: int) -> AttentionOperator:
        """Raises ConfigError unless the samples vary both lengths."""
        x = np.array([float(s.prompt_tokens) for s in samples])
        y = 1.0 - np.array([float(s.new_tokens) for s in samples]) / x
        rows = np.stack([x * x * y, x * x, x, np.ones_like(x)], axis=1)
        a, b, c, d = fit_relative(rows, np.array([s.seconds for s in samples]), "attention")
        return cls(count=count, a=a, b=b, c=c, d=d)

    def seconds(self, new: Floats, prompt: Floats, parallelism: Parallelism) -> Floats:
        x_squared_y = prompt * (prompt - new)
        work = self.a * x_squared_y + self.b * prompt * prompt + self.c * prompt
        return np.where(new > 0, np.maximum(work / parallelism.tp + self.d, 0.0), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearOperator:
    """Norms, activations, embeddings: a constant and a part a new token; `sharded` ones are divided by TP."""

    count: int
    constant_s: float
    per_token_s: float = 0.0
    sharded: bool = False

    @classmethod
    def fit(cls, samples: Sequence[OperatorSample], *, count: int, sharded: bool = False) -> LinearOperator:
        """Raises ConfigError when all samples have one length."""
        rows = np.array([[1.0, s.new_tokens] for s in samples])
        constant, per_token = fit_relative(rows, np.array([s.seconds for s in samples]), "linear operator")
        return cls(count=count, constant_s=constant, per_token_s=per_token, sharded=sharded)

    def seconds(self, new: Floats, prompt: Floats, parallelism: Parallelism) -> Floats:
        share = parallelism.tp if self.sharded else 1
        return np.where(new > 0, self.constant_s + self.per_token_s * new / share, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveOperator:
    """A ring all-reduce of the activations between TP ranks; nothing at TP 1."""

    count: int
    bytes_per_token: int
    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, new: Floats, prompt: Floats, parallelism: Parallelism) -> Floats:
        tp = parallelism.tp
        sent = 2.0 * (tp - 1) / tp * self.bytes_per_token * new / self.bytes_per_s
        return np.where(new > 0, (self.latency_s if tp > 1 else 0.0) + sent, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorModel:
    """The sum of its operators, tabulated so that one candidate costs a look-up and the attention's polynomial.

    Only attention may depend on the prompt length beside the new tokens. `hop_s`: activations to the next stage.
    Lengths between two grid points are rounded up. Cost to build: `max_tokens / grid_tokens` evaluations.
    """

    operators: tuple[Operator, ...]
    parallelism: Parallelism = Parallelism()
    decode: DecodeStep | None = None
    hop_s: float = 0.0
    grid_tokens: int = 16
    max_tokens: int = 131_072

    def __post_init__(self) -> None:
        if self.grid_tokens < 1 or self.max_tokens < self.grid_tokens:
            raise ConfigError(
                f"max_tokens={self.max_tokens} must be at least grid_tokens={self.grid_tokens}, and that positive",
                setting="max_tokens",
                value=self.max_tokens,
            )

    def with_parallelism(self, parallelism: Parallelism) -> OperatorModel:
        """The same operators, differently sharded: no new measurement."""
        return replace(self, parallelism=parallelism)

    def exact_s(self, prompt_tokens: int, cached_tokens: int) -> float:
        """Sum over the operators, without the table."""
        new, prompt = np.array([float(prompt_tokens - cached_tokens)]), np.array([float(prompt_tokens)])
        total = sum(float(op.count * op.seconds(new, prompt, self.parallelism)[0]) for op in self.operators)
        return total + (self.parallelism.pp - 1) * self.hop_s

    def compile(self) -> TabulatedModel:
        """The model that schedulers ask."""
        new = np.arange(0, self.max_tokens + self.grid_tokens, self.grid_tokens, dtype=np.float64)
        table = np.full_like(new, (self.parallelism.pp - 1) * self.hop_s)
        a = b = c = 0.0
        for op in self.operators:
            if isinstance(op, AttentionOperator):
                share = op.count / self.parallelism.tp
                a, b, c = a + op.a * share, b + op.b * share, c + op.c * share
                table += op.count * op.d
            else:
                table += op.count * op.seconds(new, new, self.parallelism)
        table.flags.writeable = False
        return TabulatedModel(
            table=table, grid_tokens=self.grid_tokens, a=a, b=b, c=c, stages=self.parallelism.pp, decode=self.decode
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TabulatedModel:
    """An OperatorModel compiled for one parallelism; see CostModel."""

    table: Floats  # [grid points] all but the attention's polynomial, by new tokens
    grid_tokens: int
    a: float
    b: float
    c: float
    stages: int = 1
    decode: DecodeStep | None = None

    @overload
    def prefill_s(self, prompt_tokens: int, cached_tokens: int) -> float: ...
    @overload
    def prefill_s(self, prompt_tokens: int, cached_tokens: Counts) -> Floats: ...
    def prefill_s(self, prompt_tokens: int, cached_tokens: int | Counts) -> float | Floats:
        """See CostModel. Raises ConfigError for prompts longer than the table."""
        x = float(prompt_tokens)
        if prompt_tokens > (len(self.table) - 1) * self.grid_tokens:
            raise ConfigError(
                f"the cost model was built for {(len(self.table) - 1) * self.grid_tokens} tokens, the prompt has "
                f"{prompt_tokens}; raise max_tokens",
                setting="max_tokens",
                value=prompt_tokens,
                limit=(len(self.table) - 1) * self.grid_tokens,
            )
        attention = (self.b * x + self.c) * x + cached_tokens * (self.a * x)
        at = (prompt_tokens - cached_tokens + self.grid_tokens - 1) // self.grid_tokens
        seconds = self.table[at] + attention
        return np.maximum(seconds, 0.0) if isinstance(seconds, np.ndarray) else max(float(seconds), 0.0)

    @overload
    def decode_step_s(self, num_sequences: int, kv_tokens: int) -> float: ...
    @overload
    def decode_step_s(self, num_sequences: Counts, kv_tokens: Counts) -> Floats: ...
    def decode_step_s(self, num_sequences: int | Counts, kv_tokens: int | Counts) -> float | Floats:
        """See CostModel. Raises ConfigError where `decode` was not given."""
        return decode_of(self.decode).seconds(num_sequences, kv_tokens)
