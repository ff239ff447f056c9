"""Frozen snapshots of a pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from poolweave.index import RadixStats
from poolweave.mempool.arena import ArenaStats
from poolweave.mempool.quotas import TenantStats
from poolweave.transfer import TransferStats
from poolweave.types import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Blocks of one tier. total = free + active + historical + limbo + mirrors while no shrinking is under way.

    `total`: what may be allocated; `free`: of it now; `active`: any reference but the index's; `historical`: the
    index's only, so evictable; `pinned`: active and indexed; `leased`: places on loan; `limbo`: on loan, left by their
    block; `overhang`: still above a lowered size; `mirrors`: second copies of blocks in HBM, dropped when DRAM is
    short; `guests`: blocks of this pool in pages of other pools of its arena, beside `total`; `handed`: of `active` and
    `limbo`, blocks that other pools of the arena hold as guests; `largest_run`: of free neighbours; `memory`: of the
    arena, with all its ranges.
    """

    tier: Tier
    total: int
    free: int
    active: int
    historical: int
    pinned: int
    leased: int
    limbo: int
    overhang: int
    mirrors: int
    guests: int
    handed: int
    largest_run: int
    mapped_bytes: int
    memory: ArenaStats

    @property
    def evictable(self) -> int:
        return self.historical


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """A pool at one moment. `events` counts blocks: evicted, demoted, swapped_out, swapped_in, deleted, ..."""

    instance: str
    eviction: str  # the name of the policy
    tiers: Mapping[Tier, TierStats]
    indexed: int
    waiting: int
    events: Mapping[str, int]
    tenants: Mapping[int, TenantStats]  # those with a quota, by a namespace of each
    index: RadixStats
    transfer: TransferStats | None  # None before the first use of transfers
