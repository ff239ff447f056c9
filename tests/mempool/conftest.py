"""Small pools: four tokens and 512 bytes a block, so that a 64 KiB page holds 128 of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from poolweave.mempool import Arena, Blocks, MemPool, PoolConfig
from poolweave.transfer import KVLayout
from poolweave.types import Tier

LAYOUT = KVLayout(num_layers=2, kv_heads=1, head_dim=8, block_tokens=4, dtype="float32")


@pytest.fixture
def layout() -> KVLayout:
    return LAYOUT


@pytest.fixture
def make_pool(layout: KVLayout) -> Iterator[Callable[..., MemPool]]:
    """make_pool(hbm_blocks, dram_blocks=0, **settings); every pool is checked and closed at the end.

    With `arena` its HBM grows to that size out of this arena.
    """
    pools: list[MemPool] = []

    def make(
        hbm: int, dram: int = 0, *, instance: str | None = None, arena: Arena | None = None, **settings: Any
    ) -> MemPool:
        config = PoolConfig(**{"page_bytes": 64 << 10, "max_hbm": "16MiB", "max_dram": "16MiB", **settings})
        if arena is not None:
            config = replace(config, max_hbm=hbm * layout.block_bytes)
        hbm_tier = hbm * layout.block_bytes if arena is None else arena
        dram_bytes = dram * layout.block_bytes
        pools.append(MemPool(layout, instance=instance, config=config, hbm=hbm_tier, dram=dram_bytes))
        return pools[-1]

    yield make
    for pool in pools:
        if not pool._closed:
            pool.check()
        pool.close()


@pytest.fixture
def fill() -> Callable[[MemPool, Blocks, int], None]:
    """fill(pool, blocks, first): write first, first + 1, ... into whole blocks, wherever they lie."""

    def write(pool: MemPool, blocks: Blocks, first: int) -> None:
        for place, (tier, handle) in enumerate(zip(pool.tiers(blocks).tolist(), blocks, strict=True)):
            one = Blocks(np.array([handle], np.uint64))
            pool.view(Tier(tier))[pool.slots(one, Tier(tier))] = first + place

    return write


@pytest.fixture
def read() -> Callable[[MemPool, Blocks], list[float]]:
    """The value of each block; fails when a block holds more than one."""

    def values(pool: MemPool, blocks: Blocks) -> list[float]:
        found = []
        for tier, handle in zip(pool.tiers(blocks).tolist(), blocks, strict=True):
            row = pool.view(Tier(tier))[pool.slots(Blocks(np.array([handle], np.uint64)), Tier(tier))]
            assert row.min() == row.max()
            found.append(float(row.min()))
        return found

    return values


@pytest.fixture
def remember() -> Callable[[MemPool, list[int], int], Blocks]:
    """remember(pool, tokens, first): index freshly written blocks and let them be history. -> the blocks"""

    def history(pool: MemPool, tokens: list[int], first: int = 1) -> Blocks:
        blocks = pool.alloc(len(tokens) // pool.layout.block_tokens)
        pool.view()[pool.slots(blocks)] = np.arange(first, first + len(blocks)).reshape(-1, 1, 1, 1, 1, 1)
        pool.seal(blocks)
        pool.insert(tokens, blocks)
        pool.free(blocks)
        return blocks

    return history
