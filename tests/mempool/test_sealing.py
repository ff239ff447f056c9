"""Sealing, of whole blocks and layer by layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from poolweave.errors import ConfigError, NotSealed, StaleHandle
from poolweave.mempool import MemPool
from poolweave.types import Tier

MakePool = Callable[..., MemPool]


def test_a_block_is_sealed_when_all_its_layers_are(make_pool: MakePool) -> None:
    pool = make_pool(8)
    blocks = pool.alloc(3)
    assert pool.sealed_layers(blocks).tolist() == [0, 0, 0]
    pool.seal(blocks[:2], layers=range(0, 1))
    pool.seal(blocks[:1], layers=range(0, 1))  # again: harmless
    assert pool.sealed_layers(blocks).tolist() == [1, 1, 0]
    with pytest.raises(NotSealed):
        pool.insert(range(4), blocks[:1])
    pool.seal(blocks[:1], layers=range(1, 2))
    pool.seal(blocks[2:])
    assert pool.sealed_layers(blocks).tolist() == [2, 1, 2]
    pool.check()
    pool.insert(range(4), blocks[:1])
    with pytest.raises(NotSealed):
        pool.insert(range(4, 8), blocks[1:2])
    pool.free(blocks)
    again = pool.alloc(7)
    assert pool.sealed_layers(again).tolist() == [0] * 7  # nothing is left of the blocks that were here before
    with pytest.raises(StaleHandle):
        pool.sealed_layers(blocks[1:])
    pool.free(again)


@pytest.mark.parametrize("layers", [range(1, 2), range(0, 3), range(-1, 1), range(2, 0, -1)], ids=str)
def test_layers_are_sealed_in_order_and_within_the_layout(make_pool: MakePool, layers: range) -> None:
    pool = make_pool(8)
    blocks = pool.alloc(2)
    pool.seal(blocks[:1], layers=range(0, 1))
    with pytest.raises(ConfigError, match="layer"):
        pool.seal(blocks, layers=layers)
    assert pool.sealed_layers(blocks).tolist() == [1, 0]
    pool.free(blocks)


def test_a_block_lent_by_layer_stays_where_it_is_written(make_pool: MakePool) -> None:
    pool = make_pool(4, 4)
    blocks = pool.alloc(2, Tier.DRAM)
    with pytest.raises(NotSealed):
        pool._store.lend(blocks.array)
    loan = pool._store.lend(blocks.array, unsealed=True)
    pool.seal(blocks, layers=range(0, 1))
    with pytest.raises(NotSealed):
        pool.swap_in(blocks)
    assert pool.stats().tiers[Tier.HBM].free == 4
    pool.seal(blocks, layers=range(1, 2))
    assert pool.swap_in(blocks) == 2
    assert pool.stats().tiers[Tier.DRAM].limbo == 2  # the borrower reads on where it was lent
    pool._store.give_back(loan)
    pool.free(blocks)
