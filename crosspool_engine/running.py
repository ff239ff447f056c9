"""An admitted request in the engine."""

from __future__ import annotations

from dataclasses import dataclass

from poolweave.crosspool_engine.kv_pool import KvLease
from poolweave.crosspool_engine.replica import Replica
from poolweave.crosspool_engine.request import DecodeRequest


@dataclass(slots=True, eq=False)
class Running:
    """Its attention ranks, its seat on the board, its KV on each of them, and how far its tokens were told."""

    request: DecodeRequest
    replica: Replica
    seat: int
    leases: tuple[KvLease, ...]  # by rank of the replica
    told: int  # tokens of it, from the prompt's first, that were emitted or given
    cancelled: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.replica.ranks

    @property
    def leader(self) -> int:
        """The rank on whose part of the board its batches are."""
        return self.replica.ranks[0]

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def model(self) -> str:
        return self.request.model
