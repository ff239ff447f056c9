"""Populating: a pool's memory is taken from the kernel before a request waits for it."""

from __future__ import annotations

import mmap

import numpy as np

from poolweave.mempool import MemPool
from poolweave.types import Tier


def populate(pool: MemPool) -> None:
    """Touch each page of HBM of a pool that nobody uses yet; what is freed keeps its pages."""
    blocks = pool.alloc(pool.stats().tiers[Tier.HBM].total)
    touched = pool.view(Tier.HBM).reshape(-1).view(np.uint8)[: len(blocks) * pool.layout.block_bytes]
    touched[:: mmap.PAGESIZE] = 0
    pool.free(blocks)
