"""The elastic block pool over HBM and DRAM."""

from poolweave.mempool.arena import Arena, ArenaStats
from poolweave.mempool.blocks import Blocks
from poolweave.mempool.catalogue import Indexed
from poolweave.mempool.config import PoolConfig, Watermarks
from poolweave.mempool.device import DeviceArray
from poolweave.mempool.following import Following
from poolweave.mempool.hit import Hit
from poolweave.mempool.pool import MemPool
from poolweave.mempool.quotas import Quota, Quotas, TenantStats
from poolweave.mempool.received import Received
from poolweave.mempool.stats import PoolStats, TierStats
from poolweave.mempool.tier_window import TierWindow

__all__ = [
    "Arena",
    "ArenaStats",
    "Blocks",
    "DeviceArray",
    "Following",
    "Hit",
    "Indexed",
    "MemPool",
    "PoolConfig",
    "PoolStats",
    "Quota",
    "Quotas",
    "Received",
    "TenantStats",
    "TierStats",
    "TierWindow",
    "Watermarks",
]
