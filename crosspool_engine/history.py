"""Sealed KV blocks of requests that ended, found again by their tokens; one attention rank's, all models'.

The blocks lie where they were decoded, in their model's range, and give way before any request has to wait.
Knows no pages: whoever owns the blocks frees what is given up.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from poolweave.index import Identity, Match, RadixIndex
from poolweave.types import TokenIds

_MODEL_SHIFT = 32  # a payload is the model's number on the board, then the block's in its range


class History:
    """An index over blocks of several models. Least recently used goes first."""

    def __init__(self, block_tokens: int) -> None:
        self._index = RadixIndex(block_tokens=block_tokens)
        self._block_tokens = block_tokens
        self._namespaces: dict[tuple[int, bytes], int] = {}

    def __len__(self) -> int:
        return len(self._index)

    def match(self, model: int, tenant: bytes, tokens: TokenIds) -> Match:
        """The longest known prefix, pinned until the result is closed. At least one token stays to be computed."""
        whole = (len(tokens) - 1) // self._block_tokens * self._block_tokens
        return self._index.match(tokens[:whole], self._namespace(model, tenant), pin=True)

    def count(self, model: int, tenant: bytes, tokens: TokenIds) -> int:
        """Tokens of the longest known prefix; this is no use of it."""
        return self._index.match(tokens, self._namespace(model, tenant), touch=False).num_tokens

    def keep(self, model: int, tenant: bytes, tokens: TokenIds, blocks: tuple[int, ...]) -> set[int]:
        """Index `blocks`, one for each whole block of `tokens`. -> those not taken: their tokens are known already"""
        payloads = np.array(blocks, np.uint64) | np.uint64(model << _MODEL_SHIFT)
        inserted = self._index.insert(tokens, payloads, self._namespace(model, tenant))
        return set(blocks_of(inserted.duplicates))

    def evict(self, count: int) -> Iterator[tuple[int, int]]:
        """Give up to `count` blocks up. -> (model, block)"""
        return _split(self._index.evict(count))

    def drop(self, model: int) -> Iterator[tuple[int, int]]:
        """Give up all of a model that no request uses."""
        for ns in [ns for (owner, _), ns in self._namespaces.items() if owner == model]:
            yield from _split(self._index.clear(ns))

    def _namespace(self, model: int, tenant: bytes) -> int:
        """A model's own prefixes, by tenant: what another one computed for the same tokens is no use to it."""
        key = model, tenant
        if key not in self._namespaces:
            self._namespaces[key] = self._index.namespace(Identity(model=str(model), salt=tenant))
        return self._namespaces[key]


def blocks_of(payloads: np.ndarray) -> tuple[int, ...]:
    """The blocks' numbers in their range."""
    return tuple((payloads & np.uint64((1 << _MODEL_SHIFT) - 1)).tolist())


def _split(payloads: np.ndarray) -> Iterator[tuple[int, int]]:
    yield from zip((payloads >> np.uint64(_MODEL_SHIFT)).tolist(), blocks_of(payloads), strict=True)
