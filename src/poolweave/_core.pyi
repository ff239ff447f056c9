"""
Native core of poolweave: arenas, blocks, the radix tree, copies and streams.
"""

from typing import Annotated, Any

import numpy
from numpy.typing import NDArray

def block_keys(
    tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    block_tokens: int,
    seed: int,
) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]:
    """Chained 64-bit keys of the whole blocks of int32 tokens."""

def tokens_of_list(tokens: list[Any]) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))] | None:
    """A list of plain ints as int32 tokens, or None."""

class PromptTreeStats:
    @property
    def blocks(self) -> int: ...
    @property
    def entries(self) -> int: ...
    @property
    def nodes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def evicted(self) -> int: ...
    @property
    def expired(self) -> int: ...
    @property
    def orphans(self) -> int: ...

class PromptTree:
    def __init__(self, max_bytes: int | None = None) -> None: ...
    def insert(
        self,
        keys: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        slot: int,
        expiry: float,
        now: float,
        parent: int | None = None,
    ) -> int: ...
    def remove(self, key: int, slot: int, now: float) -> int: ...
    def match(
        self,
        keys: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        now: float,
        scores: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu")],
    ) -> int: ...
    def retire(self, slot: int) -> None: ...
    def sweep(self, now: float, max_nodes: int) -> int: ...
    def entries(self, slot: int) -> int: ...
    def stats(self) -> PromptTreeStats: ...
    def check(self) -> None: ...
