"""Track: one request of the engine and the blocks of the pool that it holds. Knows no pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from poolweave.mempool import Blocks
from poolweave.types import Int32Array


@dataclass(slots=True)
class Track:
    """`held` are sealed blocks of its first tokens, one reference each; `planned` counts them and those under way.

    `local`: tokens that vLLM's own cache had when it asked. `generation` rises when the request starts over, so that
    steps of before know that they are late. `pending`: steps under way that write for it. `receiver`: the peer that
    gets its KV. `reserved`: blocks for what is not planned yet of its prompt, which was `offered` uncomputed.
    """

    request: Any
    ns: int
    held: Blocks = field(default_factory=Blocks.empty)
    planned: int = 0
    local: int = 0
    generation: int = 0
    pending: int = 0
    starved: bool = False
    done: bool = False
    asked: bool = False
    receiver: str | None = None
    offered: bool = False
    reserved: Blocks = field(default_factory=Blocks.empty)
    _tokens: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))

    def tokens(self) -> Int32Array:
        """The prompt and what was answered so far, int32."""
        ids = self.request.all_token_ids
        if len(ids) != len(self._tokens):
            self._tokens = np.asarray(list(ids), np.int32)
        return self._tokens


@dataclass(frozen=True, slots=True)
class Write:
    """Blocks of `track` from its block `first` on, being written; one reference each."""

    track: Track
    generation: int
    first: int
    blocks: Blocks


@dataclass(slots=True)
class Step:
    """What a step reads and writes, one reference on each; `late`: a step before it failed, so its writes are void."""

    reads: list[Blocks] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    late: bool = False
