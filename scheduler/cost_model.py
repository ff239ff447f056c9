"""How long a prompt takes on an instance, and whether moving its KV is cheaper. Source: MemServe §6.2 (facts.md §1).

Two levels of one seam. `ArchitectureModel`: one fit of the whole model, to be measured anew for each parallelism.
`OperatorModel` (operators.py): one fit an operator, of which parallelism only changes constants.
Times are seconds, lengths are tokens. Knows no instance and no queue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from poolweave.errors import ConfigError
from poolweave.scheduler.fitting import fit_nonnegative

Floats: TypeAlias = "npt.NDArray[np.float64]"
Counts: TypeAlias = "npt.NDArray[np.integer[Any]]"  # one entry a candidate


class CostModel(Protocol):
    """What a scheduler asks. Both calls are pure; `prefill_s` takes one cached length or an array of candidates."""

    @property
    def stages(self) -> int:
        """Pipeline stages: an instance works on this many prompts at a time, so it accepts one every
        prefill_s / stages."""

    @overload
    def prefill_s(self, prompt_tokens: int, cached_tokens: int) -> float: ...
    @overload
    def prefill_s(self, prompt_tokens: int, cached_tokens: Counts) -> Floats: ...
    def prefill_s(self, prompt_tokens: int, cached_tokens: int | Counts) -> float | Floats:
        """Time of a prompt alone, of which the first `cached_tokens` are reused."""

    @overload
    def decode_step_s(self, num_sequences: int, kv_tokens: int) -> float: ...
    @overload
    def decode_step_s(self, num_sequences: Counts, kv_tokens: Counts) -> Floats: ...
    def decode_step_s(self, num_sequences: int | Counts, kv_tokens: int | Counts) -> float | Floats:
        """Time of one step that gives each of `num_sequences` a token; they attend over `kv_tokens` in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSample:
    """One measured prompt."""

    prompt_tokens: int
    cached_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One measured decode step."""

    num_sequences: int
    kv_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """`constant_s` (weights read once) + a part a sequence (its rows of each GEMM) + a part a KV token (attention)."""

    constant_s: float
    per_sequence_s: float = 0.0
    per_kv_token_s: float = 0.0

    def __post_init__(self) -> None:
        require_times(self, "constant_s", "per_sequence_s", "per_kv_token_s")

    @classmethod
    def fit(cls, samples: Sequence[StepSample]) -> DecodeStep:
        """Least squares of relative errors; no term is below zero, so that an answer more never makes a step quicker.
        Raises ConfigError for too few or degenerate samples."""
        rows = np.array([[1.0, s.num_sequences, s.kv_tokens] for s in samples])
        constant, sequence, kv_token = fit_nonnegative(rows, np.array([s.seconds for s in samples]), "decode step")
        return cls(constant_s=constant, per_sequence_s=sequence, per_kv_token_s=kv_token)

    @overload
    def seconds(self, num_sequences: int, kv_tokens: int) -> float: ...
    @overload
    def seconds(self, num_sequences: int | Counts, kv_tokens: int | Counts) -> float | Floats: ...
    def seconds(self, num_sequences: int | Counts, kv_tokens: int | Counts) -> float | Floats:
        """Time of one step, elementwise."""
        seconds: float | Any = self.constant_s + num_sequences * self.per_sequence_s + kv_tokens * self.per_kv_token_s
        return seconds

    def scaled(self, factor: float) -> DecodeStep:
        return DecodeStep(
            constant_s=self.constant_s * factor,
            per_sequence_s=self.per_sequence_s * factor,
            per_kv_token_s=self.per_kv_token_s * factor,
        )


def require_times(of: Any, *settings: str) -> None:
    """Raises ConfigError unless each of them is a finite number of seconds, not negative."""
    for setting in settings:
        value = getattr(of, setting)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(
                f"{setting} must be finite and not negative, got {value}", setting=setting, value=value, limit=0
            )


def decode_of(decode: DecodeStep | None) -> DecodeStep:
    """The decode part of a model. Raises ConfigError when it has none."""
    if decode is None:
        raise ConfigError("this cost model has no decode part; give `decode`", setting="decode")
    return decode


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureModel:
    """Prefill as `quadratic_cached x²y + quadratic x² + linear x(1 - y) + constant`, y the cached ratio.

    `decode` is needed only where decode instances are chosen.
    """

    constant_s: float
    linear_s: float  # a new token
    quadratic_s: float = 0.0  # a token squared
    quadratic_cached_s: float = 0.0
    decode: DecodeStep | None = None
    stages: int = 1

    def __post_init__(self) -> None:
        require_times(self, "constant_s", "linear_s", "quadratic_s")
        if not math.isfinite(self.quadratic_cached_s):  # below zero where a pair of cached tokens takes less
            raise ConfigError(
                f"quadratic_cached_s must be finite, got {self.quadratic_cached_s}",
                setting="quadratic_cached_s",
                value=self.quadratic_cached_s,
            )
        if self.stages < 1:
            raise ConfigError(f"stages must be at least 1, got {self.stages}", setting="stages", value=self.stages)

    @classmethod
    def fit(cls, samples: Sequence[PrefillSample], decode: DecodeStep | None = None) -> ArchitectureModel:
        """Least squares of relative errors; no pair of tokens takes less than nothing. Raises ConfigError for too few
        or degenerate samples."""
        x = np.array([float(s.prompt_tokens) for s in samples])
        cached = np.array([float(s.cached_tokens) for s in samples])
        rows = np.stack([np.ones_like(x), x - cached, x * (x - cached), x * cached], axis=1)
        seconds = np.array([s.seconds for s in samples])
        constant, linear, pair, cached_pair = fit_nonnegative(rows, seconds, "prefill")
        return cls(
            constant_s=constant, linear_s=linear, quadratic_s=pair, quadratic_cached_s=cached_pair - pair, decode=decode
        )

    @overload
    def prefill_s(self, prompt_tokens: int, cached_tokens: int) -> float: ...
    @overload
    def prefill_s(self, prompt_tokens: int, cached_tokens: Counts) -> Floats: ...
    def prefill_s(self, prompt_tokens: int, cached_tokens: int | Counts) -> float | Floats:
        """See CostModel. Never negative."""
        x = float(prompt_tokens)
        new_s = self.constant_s + self.linear_s * x + self.quadratic_s * x * x
        per_cached_s = self.quadratic_cached_s * x - self.linear_s
        seconds: Any = new_s + cached_tokens * per_cached_s
        if new_s >= 0.0 and new_s + x * per_cached_s >= 0.0:  # both ends are: so is all between
            return seconds  # type: ignore[no-any-return]
        return max(seconds, 0.0) if isinstance(seconds, float) else np.maximum(seconds, 0.0)

    @overload
    def decode_step_s(self, num_sequences: int, kv_tokens: int) -> float: ...
    @overload
    def decode_step_s(self, num_sequences: Counts, kv_tokens: Counts) -> Floats: ...
    def decode_step_s(self, num_sequences: int | Counts, kv_tokens: int | Counts) -> float | Floats:
        """See CostModel. Raises ConfigError where `decode` was not given."""
        return decode_of(self.decode).seconds(num_sequences, kv_tokens)

    def scaled(self, factor: float) -> ArchitectureModel:
        """All times by `factor`: what can be done about another parallelism without measuring again."""
        return ArchitectureModel(
            constant_s=self.constant_s * factor,
            linear_s=self.linear_s * factor,
            quadratic_s=self.quadratic_s * factor,
            quadratic_cached_s=self.quadratic_cached_s * factor,
            decode=None if self.decode is None else self.decode.scaled(factor),
            stages=self.stages,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSample:
    """One measured transfer: `calls` pieces of memory, `nbytes` in all."""

    nbytes: int
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way between two instances: `bytes_per_s` as measured, `latency_s` a transfer, `per_call_s` a block sent."""

    bytes_per_s: float
    latency_s: float = 0.0
    per_call_s: float = 0.0

    def __post_init__(self) -> None:
        require_times(self, "latency_s", "per_call_s")
        if not self.bytes_per_s > 0:  # NaN is not
            raise ConfigError(
                f"bytes_per_s must be positive, got {self.bytes_per_s}", setting="bytes_per_s", value=self.bytes_per_s
            )

    @classmethod
    def fit(cls, samples: Sequence[TransferSample]) -> Link:
        """Raises ConfigError unless the samples vary bytes and calls apart from each other."""
        rows = np.array([[1.0, s.calls, s.nbytes] for s in samples])
        latency, call, byte = fit_nonnegative(rows, np.array([s.seconds for s in samples]), "transfer")
        if byte <= 0:
            raise ConfigError("transfers of more bytes took no longer; measure larger ones", setting="samples")
        return cls(bytes_per_s=1 / byte, latency_s=latency, per_call_s=call)

    def seconds(self, nbytes: int, calls: int = 1) -> float:
        """Time of a transfer of `nbytes` in `calls` pieces."""
        return self.latency_s + calls * self.per_call_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLink:
    """How KV moves between two instances: the way, and what a token weighs on it."""

    link: Link
    bytes_per_token: int

    def __post_init__(self) -> None:
        if self.bytes_per_token < 0:
            raise ConfigError(
                f"a token's KV cannot have {self.bytes_per_token} bytes",
                setting="bytes_per_token", value=self.bytes_per_token,
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMove:
    """A prefix that another instance holds: what it costs to fetch it, and what it saves."""

    tokens: int
    transfer_s: float
    saved_s: float

    @property
    def worthwhile(self) -> bool:
        """transfer(y_p, y_p') <= exec(x, y_p) - exec(x, y_p'), with y_p' the larger cached ratio."""
        return self.tokens > 0 and self.transfer_s <= self.saved_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOrRecompute:
    """Decides between fetching KV and computing it, from measured rates."""

    model: CostModel
    kv_link: KVLink
    block_tokens: int = 16

    def transfer_s(self, tokens: Counts) -> Floats:
        """Time to fetch each of these numbers of tokens, in whole blocks; 0 for none."""
        link, calls = self.kv_link.link, -(-tokens // self.block_tokens)
        byte_s = self.kv_link.bytes_per_token / link.bytes_per_s
        seconds = link.latency_s + calls * link.per_call_s + tokens * byte_s
        return np.where(tokens > 0, seconds, 0.0)

    def move(self, prompt_tokens: int, held_here: int, held_there: int) -> KVMove:
        """What fetching `held_there - held_here` tokens is worth for a prompt that will run here."""
        tokens = max(held_there - held_here, 0)
        if tokens == 0:
            return KVMove(tokens=0, transfer_s=0.0, saved_s=0.0)
        here = self.model.prefill_s(prompt_tokens, held_here)
        there = self.model.prefill_s(prompt_tokens, held_there)
        transfer_s = self.transfer_s(np.array([tokens]))
        return KVMove(tokens=tokens, transfer_s=float(transfer_s[0]), saved_s=here - there)
