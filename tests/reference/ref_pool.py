"""What a pool must remember, as plain dictionaries: the callers' references, each block's bytes, and what was indexed.

It does not predict evictions; it says which answers are possible and which are certain.
"""

from __future__ import annotations

from collections import Counter
from itertools import count

Prefix = tuple[int, ...]


class PoolOracle:
    """Handles are ints, `stamp` is what the test wrote into every element of a block."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.refs: Counter[int] = Counter()
        self.stamp: dict[int, int] = {}
        self.sealed: set[int] = set()
        self.indexed: dict[Prefix, int] = {}  # the last block known to be indexed under a prefix
        self._stamps = count(1)

    def prefixes(self, tokens: Prefix) -> list[Prefix]:
        """The prefix that each whole block of `tokens` ends."""
        ends = range(self.block_tokens, len(tokens) + 1, self.block_tokens)
        return [tokens[:end] for end in ends]

    def take(self, handles: list[int]) -> list[int]:
        """Fresh blocks of the caller, and what to write into them."""
        assert not set(handles) & set(self.stamp), "a handle was given out twice"
        for handle in handles:
            self.refs[handle] = 1
            self.stamp[handle] = next(self._stamps)
        return [self.stamp[handle] for handle in handles]

    @property
    def held(self) -> list[int]:
        return sorted(handle for handle, refs in self.refs.items() if refs > 0)

    def insert(self, tokens: Prefix, handles: list[int], duplicates: int) -> None:
        for place, (prefix, handle) in enumerate(zip(self.prefixes(tokens), handles, strict=False)):
            if place < duplicates:
                assert prefix in self.indexed, "a duplicate of what was never indexed"
            else:
                self.indexed[prefix] = handle

    def place_of(self, handle: int) -> Prefix | None:
        return next((prefix for prefix, held in self.indexed.items() if held == handle), None)

    def certain(self, tokens: Prefix) -> int:
        """Blocks that match for sure: indexed and held by a caller, all the way from the start."""
        sure = 0
        for prefix in self.prefixes(tokens):
            if self.refs[self.indexed.get(prefix, 0)] < 1:
                break
            sure += 1
        return sure
