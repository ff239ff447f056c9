"""A request inside an engine: its tokens, its blocks and how its next token is chosen. Knows no torch."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from poolweave.errors import PoolweaveError, RequestRefused
from poolweave.mempool import Blocks
from poolweave.serving.engine.hooks import LayerHook

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "error"]

_MAX_SEED = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How an answer is drawn and when it ends. Raises RequestRefused for values that cannot work.

    `temperature` 0 is greedy. `top_p` keeps the smallest set of tokens whose probability reaches it. `seed` makes the
    draw of each position a function of (seed, position) alone: the same whatever else runs, after a preemption, and
    on another instance that goes on with the answer; None draws a seed. `stop` strings need a model with a tokenizer.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if self.max_new_tokens < 1:
            raise RequestRefused(f"max_new_tokens must be at least 1, got {self.max_new_tokens}", limit=1)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestRefused(f"temperature must be finite and not negative, got {self.temperature}", limit=0)
        if not 0 < self.top_p <= 1:
            raise RequestRefused(f"top_p must be in (0, 1], got {self.top_p}", limit=1)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise RequestRefused(f"stop strings must be non-empty text, got {self.stop!r}")
        if self.seed is not None and not 0 <= self.seed < _MAX_SEED:
            raise RequestRefused(f"seed must be in [0, 2**64), got {self.seed}", limit=_MAX_SEED)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request, owned by whoever made it; an engine works on it between `add` and its finish.

        tokens: [0, num_computed) KV in blocks, [num_computed, len) not yet;  [0, num_prompt) prompt, then the answer

    `blocks` are references of the owner: a matched or received prefix to start from, and what the engine allocates as
    the sequence grows. After the finish the owner seals, indexes, sends or frees them; a preempted sequence's blocks
    are freed by the engine and computed again. `forced` is a recorded answer: its tokens are emitted in place of
    drawn ones, up to its end or `max_new_tokens`, whatever stop conditions say. `hook` hears of each layer. Set
    `cancelled` from any thread.
    """

    request_id: str
    tokens: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_prompt: int = -1  # defaults to all of `tokens`
    num_computed: int = 0
    blocks: Blocks = field(default_factory=Blocks.empty)
    forced: tuple[int, ...] | None = None
    hook: LayerHook | None = None
    ns: int | None = None  # the pool's namespace of its KV, whose quota pays; None: the pool's own
    model: str = ""  # by name, where an engine has several
    salt: bytes = b""  # whose KV it is, for an engine that keeps some
    cancelled: bool = False
    finish_reason: FinishReason | None = None
    matched_stop: str | None = None  # the stop string that ended the answer; the text ends before it
    error: PoolweaveError | None = None
    num_preemptions: int = 0
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [int(token) for token in self.tokens]
        if self.num_prompt < 0:
            self.num_prompt = len(self.tokens)
        self.seed = secrets.randbits(64) if self.sampling.seed is None else self.sampling.seed

    @property
    def answer(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.num_prompt :]

    @property
    def num_answer(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is not in blocks yet; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a step did for one request: a new token, its end, or both."""

    request_id: str
    token: int | None
    finish_reason: FinishReason | None
