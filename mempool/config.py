"""Settings of a pool that have a good default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from poolweave.errors import ConfigError
from poolweave.index import Identity, RecomputeCost
from poolweave.index.eviction import policy_name
from poolweave.mempool.arena import Wanted, wanted
from poolweave.mempool.quotas import Quotas
from poolweave.transfer import KVLayout, TransferConfig

if TYPE_CHECKING:
    from poolweave.index.events import PublisherConfig  # which needs ZeroMQ, a pool does not


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermarks:
    """Above the share `high` of a tier in use, room is made down to `low`. Raises ConfigError out of range."""

    high: float
    low: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high <= 1:
            raise ConfigError(
                f"watermarks are 0 < low <= high <= 1, got {self.low} and {self.high}",
                setting="watermarks", value=self.high, limit=self.low,
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Raises ConfigError for values out of range.

    `page_bytes`: unit of mapping, a power of two. `max_hbm`, `max_dram`: what resize() may grow a tier to (address
    space, not memory); None is four times the first size, and at least the machine's memory. `huge_pages`, `pinned`:
    "off", "prefer" or "require", see Arena; of a pool on a GPU, `pinned` DRAM is registered with it. `watermarks`: when
    a thread makes room in HBM before an alloc needs it; None: never. `copy_threads`: of a swap.
    `eviction`: which history goes first, one of EVICTION_POLICIES, or figures for "cost-aware".
    `write`: when a block is copied to DRAM: "back", when it is demoted, or "through", soon after it is sealed.
    `quotas`: what each tenant may take at most.
    `events`: publish what the index takes, gives up and moves between tiers, in vLLM's and SGLang's wire format.
    """

    page_bytes: int = 2 << 20
    max_hbm: int | str | None = None
    max_dram: int | str | None = None
    huge_pages: Wanted = "off"
    pinned: Wanted = "off"
    watermarks: Watermarks | None = None
    copy_threads: int = 2
    transfer: TransferConfig | None = None
    eviction: str | RecomputeCost = "lru"
    quotas: Quotas | None = None
    events: PublisherConfig | None = None
    write: Literal["back", "through"] = "back"

    def identity(self, layout: KVLayout) -> Identity:
        """What a pool of `layout` holds unless a namespace says more: a shard's prefixes are its whole model's."""
        shard = self.transfer.shard if self.transfer is not None else None
        whole = layout if shard is None else shard.cut.layout
        return Identity(layout=whole.fingerprint(), dtype=layout.dtype)

    def __post_init__(self) -> None:
        if self.page_bytes < 4096 or self.page_bytes & (self.page_bytes - 1):
            raise ConfigError(
                f"page_bytes must be a power of two of at least 4096, got {self.page_bytes}",
                setting="page_bytes", value=self.page_bytes,
            )  # fmt: skip
        for setting in ("huge_pages", "pinned"):
            wanted(getattr(self, setting), setting)
        policy_name(self.eviction)
        if self.write not in ("back", "through"):
            raise ConfigError(f"write={self.write!r} is none of back, through", setting="write", value=self.write)
        if not 1 <= self.copy_threads <= 64:
            raise ConfigError(
                f"copy_threads must lie in [1, 64], got {self.copy_threads}",
                setting="copy_threads", value=self.copy_threads,
            )  # fmt: skip
