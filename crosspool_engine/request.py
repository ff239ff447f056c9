"""A request to a decode engine and what comes of it. Knows no model and no worker."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from poolweave.crosspool_engine.brought_kv import BroughtKv
from poolweave.errors import PoolweaveError, RequestRefused
from poolweave.types import Int32Array, TokenIds, as_tokens

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "error"]

MAX_STOPS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeRequest:
    """Tokens to continue. KV of the first `len(kv) * block_tokens` tokens, or fewer by `num_computed`, may come along.

    `kv`: `[blocks, layers, parts, block_tokens, heads, dim]` in the model's KV dtype (bfloat16 as uint16), as prefill
    computed it; an array, or where it lies in a pool. Tokens beyond `num_computed` are computed here, one a step; at
    least one is. `return_kv`: the result carries the KV of all computed tokens, but for the first `known_blocks`, which
    who asks has. KV that stays is found again by requests of the same `tenant` only. Raises RequestRefused for values
    that cannot work.
    """

    request_id: str
    model: str
    tokens: TokenIds
    max_new_tokens: int = 16
    kv: BroughtKv | npt.NDArray[Any] | None = None
    num_computed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    return_kv: bool = False
    known_blocks: int = 0
    tenant: bytes = b""

    def __post_init__(self) -> None:
        prompt = as_tokens(self.tokens)
        object.__setattr__(self, "tokens", prompt)
        if not len(prompt):
            raise RequestRefused("a request needs at least one token to continue", needed=1)
        if self.max_new_tokens < 1:
            raise RequestRefused(f"max_new_tokens must be at least 1, got {self.max_new_tokens}", limit=1)
        if not 0 <= self.num_computed < len(prompt) or (self.num_computed > 0) != (self.kv is not None):
            raise RequestRefused(
                f"num_computed {self.num_computed} of {len(prompt)} tokens: at least one is computed here, and KV "
                "comes with the others", needed=self.num_computed, limit=len(prompt) - 1,
            )  # fmt: skip
        if self.known_blocks < 0:
            raise RequestRefused(f"known_blocks must not be negative, got {self.known_blocks}", needed=0)
        if not (math.isfinite(self.temperature) and self.temperature >= 0) or not 0 < self.top_p <= 1:
            raise RequestRefused(f"temperature {self.temperature} or top_p {self.top_p} cannot be sampled with")
        if len(self.stop_token_ids) > MAX_STOPS or not 0 <= self.seed < 2**64:
            raise RequestRefused(
                f"at most {MAX_STOPS} stop tokens and a seed of 64 bits",
                needed=len(self.stop_token_ids),
                limit=MAX_STOPS,
            )

    @property
    def num_prompt(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        """Tokens it has at most, the prompt's included."""
        return self.num_prompt + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class Emitted:
    """What happened to one request: a new token, its end, or both. `error` says why an end was none of its own."""

    request_id: str
    token: int | None
    finish_reason: FinishReason | None = None
    error: PoolweaveError | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A request that ended: its new tokens, when each was known (monotonic ns), and its KV if asked for."""

    request_id: str
    tokens: Int32Array
    stamps_ns: npt.NDArray[np.int64]
    finish_reason: FinishReason
    error: PoolweaveError | None = None
    kv: npt.NDArray[Any] | None = None
    reused_tokens: int = 0  # of the prompt: their KV was here, from a request before
