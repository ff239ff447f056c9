"""Requests to replay: when they arrive, which session they continue, which blocks they share.

Only lengths and equality of prefixes matter to a simulation, so prompts are chained block keys. Loaders of recorded
files: trace_files.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from poolweave.errors import ConfigError
from poolweave.scheduler.prompt_tree import block_keys_of
from poolweave.types import Int32Array, UInt64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceRequest:
    """One request. `answer_keys`: blocks of prompt and answer together, which start with `keys`."""

    arrival_s: float
    keys: UInt64Array
    num_tokens: int
    output_tokens: int
    answer_keys: UInt64Array
    session: str | None = None
    cache_tokens: Int32Array = field(init=False)  # two a key of the answer's: what a simulated cache is asked for

    def __post_init__(self) -> None:
        # numpy's own dtype object, which an index takes as it is; that of a native array is another, if an equal one
        object.__setattr__(self, "answer_keys", self.answer_keys.view(np.uint64))
        halves = self.answer_keys.view(np.int32) & np.int32(0x7FFFFFFF)
        object.__setattr__(self, "cache_tokens", halves)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests by arrival. Within a session each waits for the answer before it."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    def __post_init__(self) -> None:
        arrivals = [request.arrival_s for request in self.requests]
        if arrivals != sorted(arrivals):
            raise ConfigError(f"the requests of trace {self.name!r} are not in order of arrival", setting="trace")
        for request in self.requests:
            if request.num_tokens < 1 or request.output_tokens < 1:
                raise ConfigError(
                    f"trace {self.name!r} has a request of {request.num_tokens} + {request.output_tokens} tokens; "
                    "both must be at least 1",
                    setting="trace",
                )

    @property
    def prompt_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)

    def head(self, count: int) -> Trace:
        """The first `count` requests."""
        return replace(self, requests=self.requests[:count])

    def at_rate(self, per_s: float, seed: int = 0) -> Trace:
        """The same requests in the same order with Poisson arrivals, `per_s` in the mean."""
        if not 0 < per_s < math.inf:
            raise ConfigError(f"a rate must be positive, got {per_s}", setting="rate", value=per_s)
        if seed < 0:
            raise ConfigError(f"a seed must not be negative, got {seed}", setting="seed", value=seed)
        gaps = np.random.default_rng(seed).exponential(1 / per_s, len(self.requests))
        arrivals = np.cumsum(gaps).tolist()
        moved = tuple(replace(r, arrival_s=at) for r, at in zip(self.requests, arrivals, strict=True))
        return replace(self, requests=moved)

    def reuse(self) -> float:
        """Share of the prompt tokens that a cache without limits, asked in this order, would hold."""
        seen: set[int] = set()
        hit = 0
        for request in self.requests:
            keys = request.keys.tolist()
            matched = next((i for i, key in enumerate(keys) if key not in seen), len(keys))
            hit += min(matched, (request.num_tokens - 1) // self.block_tokens) * self.block_tokens
            seen.update(request.answer_keys.tolist())
        return hit / self.prompt_tokens if self.requests else 0.0


class TokenSource:
    """Token ids for texts of which only lengths are known: the same label gives the same tokens, others differ."""

    def __init__(self, block_tokens: int, vocabulary: int = 32_000) -> None:
        self.block_tokens = block_tokens
        self._vocabulary = vocabulary

    def tokens(self, label: str, length: int) -> Int32Array:
        """`length` tokens of the text that `label` names; a shorter length gives a prefix."""
        seed = int.from_bytes(label.encode(), "little")
        return np.random.default_rng(seed).integers(0, self._vocabulary, length, dtype=np.int32)

    def request(
        self, arrival_s: float, prompt: Sequence[Int32Array], answer: Int32Array, session: str | None = None
    ) -> TraceRequest:
        """A request of the given parts, one after the other."""
        whole = np.concatenate([*prompt, answer])
        answer_keys = block_keys_of(whole, self.block_tokens)
        num_tokens = len(whole) - len(answer)
        return TraceRequest(
            arrival_s=arrival_s,
            keys=answer_keys[: num_tokens // self.block_tokens],
            num_tokens=num_tokens,
            output_tokens=len(answer),
            answer_keys=answer_keys,
            session=session,
        )


def in_order(name: str, block_tokens: int, requests: Iterable[TraceRequest]) -> Trace:
    """A trace of requests in any order."""
    ordered = tuple(sorted(requests, key=lambda request: request.arrival_s))
    return Trace(name=name, block_tokens=block_tokens, requests=ordered)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Made-up prompts: each session of `turns` requests is about one of `prefixes` common beginnings, which make up
    `share` of a prompt. Sessions share beginnings with each other, which session routing cannot see."""

    share: float
    num_requests: int = 1000
    prompt_tokens: int = 4096
    output_tokens: int = 32
    prefixes: int = 16
    turns: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or min(self.num_requests, self.prompt_tokens, self.prefixes, self.turns) < 1:
            raise ConfigError(f"share must be between 0 and 1 and counts positive, got {self}", setting="share")

    def trace(self) -> Trace:
        """All requests at time 0, sessions interleaved; see `Trace.at_rate`."""
        source, draw = TokenSource(16), np.random.default_rng(self.seed)
        common = round(self.prompt_tokens * self.share)
        prefixes = [source.tokens(f"prefix-{self.seed}-{i}", common) for i in range(self.prefixes)]
        sessions = -(-self.num_requests // self.turns)
        about = draw.integers(self.prefixes, size=sessions)
        made = []
        for i in range(self.num_requests):
            label, session = f"{self.seed}-{i}", i % sessions
            own = source.tokens(f"own-{label}", self.prompt_tokens - common)
            answer = source.tokens(f"answer-{label}", self.output_tokens)
            made.append(source.request(0.0, [prefixes[about[session]], own], answer, f"session-{session}"))
        return Trace(name=f"shared-{self.share:g}", block_tokens=16, requests=tuple(made))
