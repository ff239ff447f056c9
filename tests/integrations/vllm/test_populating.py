"""A pool's memory is there before its first request."""

from __future__ import annotations

import os

from vllm_house import LAYOUT

from poolweave.integrations.vllm.populating import populate
from poolweave.mempool import MemPool
from poolweave.types import Tier


def test_all_memory_is_there_and_free() -> None:
    with MemPool(LAYOUT, hbm="1MiB") as pool:
        total = pool.stats().tiers[Tier.HBM].total

        def taken() -> int:
            return os.fstat(pool.window().fd).st_blocks * 512

        assert taken() < total * LAYOUT.block_bytes // 2
        populate(pool)
        assert taken() >= total * LAYOUT.block_bytes
        assert pool.stats().tiers[Tier.HBM].free == total
        pool.check()
