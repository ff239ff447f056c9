"""Operator-level cost model: each operator fitted alone, parallelism as multipliers. Source: MemServe §6.2.

    compute-bound (GEMM)      (eta - 1) * full_wave + last_wave,  eta = ceil(thread blocks / SMs)
    memory-bound attention    a x²y + b x² + c x + d + e x(1-y) + f,  x prompt length, y cached ratio
    norms, activations        linear in the new tokens, or constant

TP divides a GEMM's columns and the attention's heads and adds collectives; PP divides the layers among stages and adds
hops between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, overload

import numpy as np

from poolweave.errors import ConfigError
from poolweave.scheduler.cost_model import Counts, DecodeStep, Floats, decode_of
from poolweave.scheduler.fitting import fit_nonnegative


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
    weights_s: float = 0.0  # reading the weights, of which each rank has its share
    sharded: bool = True

    @classmethod
    def fit(
        cls,
        samples: Sequence[OperatorSample],
        *,
        count: int,
        tile_tokens: int,
        column_blocks: int,
        num_sms: int,
        launch_s: float | None = None,
        sharded: bool = True,
    ) -> WaveOperator:
        """The two wave times. With `launch_s`, what a call takes beside its waves, the last wave is as long as the
        others and the rest is the weights'. Raises ConfigError when all samples have the same number of waves."""
        shape = {"count": count, "tile_tokens": tile_tokens, "column_blocks": column_blocks, "num_sms": num_sms}
        unfitted = cls(**shape, sharded=sharded, full_wave_s=1.0, last_wave_s=0.0)
        new = np.array([float(s.new_tokens) for s in samples])
        full_waves = unfitted.waves(new, Parallelism()) - 1
        rows = np.stack([full_waves, np.ones_like(new)], axis=1)
        full, last = fit_nonnegative(rows, np.array([s.seconds for s in samples]), "compute-bound operator")
        weights = 0.0 if launch_s is None else max(last - full - launch_s, 0.0)
        return replace(unfitted, full_wave_s=full, last_wave_s=last - weights, weights_s=weights)

    def waves(self, new: Floats, parallelism: Parallelism) -> Floats:
        columns = -(-self.column_blocks // self._ranks(parallelism))
        return np.ceil(np.ceil(new / self.tile_tokens) * columns / self.num_sms)

    def seconds(self, new: Floats, prompt: Floats, parallelism: Parallelism) -> Floats:
        eta = self.waves(new, parallelism)
        weights_s = self.weights_s / self._ranks(parallelism)
        return np.where(eta > 0, (eta - 1) * self.full_wave_s + self.last_wave_s + weights_s, 0.0)

    def _ranks(self, parallelism: Parallelism) -> int:
        return parallelism.tp if self.sharded else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOperator:
    """a x²y + b x² + c x + d, and beside the paper's terms e for each new token, whose key is rotated and written, and
    f for each call, as in tiles that are computed whole. TP divides all but the launch `d`: each rank has its share of
    the heads."""

    count: int
    a: float
    b: float
    c: float
    d: float
    e: float = 0.0
    f: float = 0.0

    @classmethod
    def fit(cls, samples: Sequence[OperatorSample], *, count: int, launch_s: float | None = None) -> AttentionOperator:
        """No token and no pair of tokens takes less than nothing. With `launch_s`, what a call takes that has nothing
        to do, the rest of the constant is `f`. Raises ConfigError unless the samples vary both lengths."""
        x, new = np.array([(float(s.prompt_tokens), float(s.new_tokens)) for s in samples]).T
        rows = np.stack([x * new, x * (x - new), new, x - new, np.ones_like(x)], axis=1)
        seconds = np.array([s.seconds for s in samples])
        pair, cached_pair, token, cached_token, constant = fit_nonnegative(rows, seconds, "attention")
        launch = constant if launch_s is None else min(launch_s, constant)
        return cls(
            count=count, a=cached_pair - pair, b=pair, c=cached_token, d=launch, e=token - cached_token,
            f=constant - launch,
        )  # fmt: skip

    def seconds(self, new: Floats, prompt: Floats, parallelism: Parallelism) -> Floats:
        x_squared_y = prompt * (prompt - new)
        work = self.a * x_squared_y + self.b * prompt * prompt + self.c * prompt + self.e * new + self.f
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
        constant, per_token = fit_nonnegative(rows, np.array([s.seconds for s in samples]), "linear operator")
        return cls(count=count, constant_s=constant, per_token_s=per_token, sharded=sharded)

    def seconds(self, new: Floats, prompt: Floats, parallelism: Parallelism) -> Floats:
        share = parallelism.tp if self.sharded else 1
        return np.where(new > 0, self.constant_s + self.per_token_s * new / share, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSample:
    """One measured exchange of a tensor of `nbytes` between ranks: an all-reduce, or a send to the next stage."""

    nbytes: int
    seconds: float


def _exchange_of(samples: Sequence[ExchangeSample], share: float, what: str) -> tuple[float, float]:
    """Bytes a second and latency, where `share` of a tensor is sent. Raises ConfigError when more took no longer."""
    rows = np.array([[1.0, share * sample.nbytes] for sample in samples])
    latency, byte = fit_nonnegative(rows, np.array([sample.seconds for sample in samples]), what)
    if byte <= 0:
        raise ConfigError(f"{what}s of more bytes took no longer; measure larger ones", setting="samples")
    return 1 / byte, latency


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveOperator:
    """A ring all-reduce of the activations between TP ranks; nothing at TP 1."""

    count: int
    bytes_per_token: int
    bytes_per_s: float
    latency_s: float = 0.0

    @classmethod
    def fit(
        cls, samples: Sequence[ExchangeSample], *, ranks: int, count: int, bytes_per_token: int
    ) -> CollectiveOperator:
        """From all-reduces of several sizes between `ranks`. Raises ConfigError when size makes no difference."""
        bytes_per_s, latency_s = _exchange_of(samples, 2.0 * (ranks - 1) / ranks, "all-reduce")
        return cls(count=count, bytes_per_token=bytes_per_token, bytes_per_s=bytes_per_s, latency_s=latency_s)

    def seconds(self, new: Floats, prompt: Floats, parallelism: Parallelism) -> Floats:
        tp = parallelism.tp
        sent = 2.0 * (tp - 1) / tp * self.bytes_per_token * new / self.bytes_per_s
        return np.where(new > 0, (self.latency_s if tp > 1 else 0.0) + sent, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HopOperator:
    """The activations' way from one PP stage to the next; nothing at PP 1."""

    bytes_per_token: int
    bytes_per_s: float
    latency_s: float = 0.0
    count: int = 1

    @classmethod
    def fit(cls, samples: Sequence[ExchangeSample], *, bytes_per_token: int) -> HopOperator:
        """From sends of several sizes. Raises ConfigError when size makes no difference."""
        bytes_per_s, latency_s = _exchange_of(samples, 1.0, "send")
        return cls(bytes_per_token=bytes_per_token, bytes_per_s=bytes_per_s, latency_s=latency_s)

    def seconds(self, new: Floats, prompt: Floats, parallelism: Parallelism) -> Floats:
        hop = self.latency_s + self.bytes_per_token * new / self.bytes_per_s
        return np.where(new > 0, (parallelism.pp - 1) * hop, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorModel:
    """The sum of its operators, tabulated so that one candidate costs a look-up and the attention's polynomial.

    Only attention may depend on the prompt length beside the new tokens. Lengths between two grid points are rounded
    up. Cost to build: `max_tokens / grid_tokens` evaluations.
    """

    operators: tuple[Operator, ...]
    parallelism: Parallelism = Parallelism()
    decode: DecodeStep | None = None
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
        return sum(float(op.count * op.seconds(new, prompt, self.parallelism)[0]) for op in self.operators)

    def compile(self) -> TabulatedModel:
        """The model that schedulers ask."""
        new = np.arange(0, self.max_tokens + self.grid_tokens, self.grid_tokens, dtype=np.float64)
        table = np.zeros_like(new)
        a = b = c = 0.0
        for op in self.operators:
            if isinstance(op, AttentionOperator):
                share = op.count / self.parallelism.tp
                a, b, c = a + op.a * share, b + op.b * share, c + op.c * share
                table += op.count * op.d + share * (op.e * new + op.f)
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
