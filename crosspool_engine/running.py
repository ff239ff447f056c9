"""An admitted request in the engine."""

from __future__ import annotations

from dataclasses import dataclass

from poolweave.crosspool_engine.kv_pool import KvLease
from poolweave.crosspool_engine.request import DecodeRequest


@dataclass(slots=True, eq=False)
class Running:
    """Its attention rank, its seat on the board, its KV, and how far its tokens were told."""

    request: DecodeRequest
    rank: int
    seat: int
    lease: KvLease
    told: int  # tokens of it, from the prompt's first, that were emitted or given
    cancelled: bool = False

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def model(self) -> str:
        return self.request.model
