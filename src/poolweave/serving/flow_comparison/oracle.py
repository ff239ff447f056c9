"""What reuse must be, from token lists alone: cached tokens and blocks sent for each flow and turn.

Holds while nothing is evicted and requests of one tenant reach the prefill instance one after another. It keeps plain
sets of prefixes and shares no code with pool, index or transfer, so that measured figures can be held against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from poolweave.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request as it ran: the prompt's tokens and the answer's."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What one request must have cost. Blocks are whole or, the last of a prompt, partial: each counts as one."""

    cached_tokens: int  # of the prompt, found at P (or at the one instance)
    blocks_to_decode: int
    blocks_to_prefill: int


@dataclass(frozen=True, slots=True)
class _Side:
    """The prefixes one instance has indexed, as bytes of their tokens."""

    block_tokens: int
    known: set[bytes]

    def insert(self, tokens: Sequence[int]) -> None:
        self.known.update(self._prefixes(tokens))

    def match(self, tokens: Sequence[int]) -> int:
        """Whole blocks of `tokens` known from the start on."""
        count = 0
        for prefix in self._prefixes(tokens):
            if prefix not in self.known:
                break
            count += 1
        return count

    def _prefixes(self, tokens: Sequence[int]) -> Iterator[bytes]:
        raw = np.asarray(tokens, np.int32)
        for end in range(self.block_tokens, len(raw) + 1, self.block_tokens):
            yield raw[:end].tobytes()


def predict(flow: str, rounds: Sequence[Sequence[Asked]], block_tokens: int) -> list[list[Expected]]:
    """One `Expected` for each request of each round, in order.

    Requests of a round overlap in time: each hands its prompt over before the next one starts, and all answers are
    complete before the next round. Raises ConfigError for a flow that is none.
    """
    if flow not in _RULES:
        raise ConfigError(f"flow {flow!r} is not one of {', '.join(_RULES)}", setting="flow", value=flow)
    rules = _RULES[flow]
    p, d = _Side(block_tokens, set()), _Side(block_tokens, set())
    return [_round(rules, p, d, asked) for asked in rounds]


@dataclass(frozen=True, slots=True)
class _Rules:
    """A row of the flow table: which instance remembers what, and what is sent."""

    reuse: bool = False  # P matches before and inserts after prefill
    lacking: bool = False  # P sends only what D lacks; D remembers prompts and answers
    back: bool = False  # D sends the answer's KV back
    colocated: bool = False


_RULES = {
    "pd-basic": _Rules(),
    "pd-caching-1": _Rules(reuse=True),
    "pd-caching-2": _Rules(reuse=True, lacking=True),
    "pd-caching-3": _Rules(reuse=True, lacking=True, back=True),
    "colocated": _Rules(reuse=True, colocated=True),
}


def _round(rules: _Rules, p: _Side, d: _Side, asked: Sequence[Asked]) -> list[Expected]:
    opened = [_prefill(rules, p, d, request) for request in asked]
    return [
        Expected(cached_tokens=cached, blocks_to_decode=sent, blocks_to_prefill=finish(rules, p, d, request))
        for request, (cached, sent, finish) in zip(asked, opened, strict=True)
    ]


_Finish = Callable[[_Rules, _Side, _Side, Asked], int]


def _prefill(rules: _Rules, p: _Side, d: _Side, request: Asked) -> tuple[int, int, _Finish]:
    """-> cached tokens, blocks sent to D, and how the request goes on."""
    size, prompt = p.block_tokens, request.prompt
    cached = min(p.match(prompt), (len(prompt) - 1) // size) * size if rules.reuse else 0
    if rules.reuse:
        p.insert(prompt)
    if rules.colocated:
        return cached, 0, _decode_here
    if len(request.answer) == 1:  # the first token, P's, was the whole answer: D is not asked
        return cached, 0, _nothing_more
    blocks = -(-len(prompt) // size)
    sent = blocks - d.match(prompt) if rules.lacking else blocks
    if rules.lacking:
        d.insert(prompt)
    return cached, sent, _decode


def _computed(request: Asked) -> tuple[int, ...]:
    """The tokens whose KV exists at the end: all but the last one, which nothing came after."""
    return (request.prompt + request.answer)[:-1]


def _decode(rules: _Rules, p: _Side, d: _Side, request: Asked) -> int:
    tokens = _computed(request)
    if rules.lacking:
        d.insert(tokens)
    if not rules.back:
        return 0
    sent = len(tokens) // p.block_tokens - p.match(tokens)
    p.insert(tokens)
    return sent


def _decode_here(rules: _Rules, p: _Side, d: _Side, request: Asked) -> int:
    p.insert(_computed(request))
    return 0


def _nothing_more(rules: _Rules, p: _Side, d: _Side, request: Asked) -> int:
    return 0
