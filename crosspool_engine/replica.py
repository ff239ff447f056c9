"""One copy of a model's attention: on one attention rank, or its heads spread over several, each with their KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from poolweave.crosspool_engine.kv_pool import KvLease, KvPool
from poolweave.crosspool_engine.request import DecodeRequest
from poolweave.types import TokenIds


@dataclass(frozen=True, slots=True)
class Replica:
    """`pools` by rank, ascending: each keeps blocks of its own numbering, of its share of the heads."""

    pools: tuple[KvPool, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(pool.rank for pool in self.pools)

    @property
    def free_bytes(self) -> int:
        """Of the fullest rank: each needs as much."""
        return min(pool.free_bytes for pool in self.pools)

    def known_tokens(self, request: DecodeRequest) -> int:
        """Tokens of a request whose KV every rank has in its history."""
        return min(pool.known_tokens(request) for pool in self.pools)

    def can_ever(self, model: str, num_tokens: int) -> bool:
        return all(pool.can_ever(model, num_tokens) for pool in self.pools)

    def take(self, request: DecodeRequest) -> tuple[KvLease, ...] | None:
        """A lease of each rank, with as many tokens reused on each; None where one has no room. Raises WorkerLost.

        All or nothing.
        """
        known = self.known_tokens(request) if len(self.pools) > 1 else None
        leases: list[KvLease] = []
        try:
            for pool in self.pools:
                lease = pool.take(request, known)
                if lease is None:
                    self._give_back(request.model, leases)
                    return None
                leases.append(lease)
        except BaseException:
            self._give_back(request.model, leases)
            raise
        assert len({lease.num_computed for lease in leases}) == 1
        return tuple(leases)

    def give(self, model: str, leases: Sequence[KvLease], computed: TokenIds | None) -> None:
        """End a request's leases, as KvPool.give."""
        for pool, lease in zip(self.pools, leases, strict=True):
            pool.give(model, lease, computed)

    def read(self, model: str, leases: Sequence[KvLease], first: int, num_tokens: int) -> npt.NDArray[Any]:
        """A copy of the KV of the first tokens, of all heads, from block `first` on."""
        parts = [
            pool.read(model, lease.blocks[first : pool.num_blocks(model, num_tokens)])
            for pool, lease in zip(self.pools, leases, strict=True)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-2)

    def _give_back(self, model: str, leases: Sequence[KvLease]) -> None:
        for pool, lease in zip(self.pools, leases, strict=False):
            pool.give(model, lease)
