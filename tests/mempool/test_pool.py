"""The pool's calls one by one, and the reported faults C1-C5, C10, C13."""

from __future__ import annotations

import contextlib
import gc
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from poolweave.errors import (
    ConfigError,
    InstanceClosed,
    NotResident,
    NotSealed,
    OutOfBlocks,
    PrivateBlock,
    StaleHandle,
    UnknownBlock,
)
from poolweave.index import Identity
from poolweave.mempool import Blocks, MemPool, PoolConfig
from poolweave.transfer import KVLayout
from poolweave.types import Tier

MakePool = Callable[..., MemPool]
Remember = Callable[[MemPool, list[int]], Blocks]


def prompt(seed: int, num_blocks: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=4 * num_blocks)


# --- memory ---------------------------------------------------------------------------------------------------


def test_view_has_the_layouts_axes_and_shares_memory(make_pool: MakePool, layout: KVLayout) -> None:
    pool = make_pool(8, 4)
    blocks = pool.alloc(2, Tier.HBM | Tier.DRAM)
    view = pool.view()
    assert view.shape[1:] == (2, 2, 4, 1, 8)
    assert view.dtype == np.float32
    assert view.shape[0] >= 8
    view[pool.slots(blocks)] = 3
    assert pool.view()[pool.slots(blocks)].min() == 3
    assert pool.slots(blocks).dtype == np.int32


@pytest.mark.parametrize("order", ["aggregated", "layered"])
def test_bfloat16_and_mla_and_layered_views(order: str) -> None:
    layout = KVLayout.mla(num_layers=3, rank=12, rope=4, block_tokens=4, order=order)
    with MemPool(layout, hbm=6 * layout.block_bytes, dram=6 * layout.block_bytes) as pool:
        view = pool.view()
        assert view.dtype == np.uint16
        assert view.shape[1:] == (3, 1, 4, 1, 16)
        blocks = pool.alloc(3)
        view[pool.slots(blocks)] = np.arange(3).reshape(3, 1, 1, 1, 1, 1)
        pool.seal(blocks)
        pool.insert(list(range(12)), blocks)
        pool.free(blocks)
        assert pool.swap_out(3) == 3
        moved = pool.view(Tier.DRAM)[pool.slots(blocks, Tier.DRAM)]
        assert [int(block.min()) for block in moved] == [int(block.max()) for block in moved] == [0, 1, 2]
        pool.check()


def test_slots_of_a_block_elsewhere_is_not_resident(make_pool: MakePool) -> None:
    pool = make_pool(2, 2)
    blocks = pool.alloc(3, Tier.HBM | Tier.DRAM)
    assert pool.tiers(blocks).tolist() == [1, 1, 2]
    with pytest.raises(NotResident, match="swap it in"):
        pool.slots(blocks)
    assert pool.slots(blocks[2:], Tier.DRAM).tolist() == [0]


def test_views_live_on_after_close(make_pool: MakePool) -> None:
    pool = make_pool(4)
    blocks = pool.alloc(1)
    view = pool.view()
    view[0] = 5
    pool.close()
    assert view[0].min() == 5
    for call in (lambda: pool.alloc(1), lambda: pool.free(blocks), lambda: pool.match([1] * 8), pool.stats):
        with pytest.raises(InstanceClosed):
            call()
    pool.close()


def test_wrong_sizes_and_devices_are_refused(layout: KVLayout) -> None:
    for settings, word in [
        ({"hbm": 10}, "hbm"),
        ({"hbm": "1MiB", "dram": 10}, "dram"),
        ({"hbm": "1MiB", "config": PoolConfig(max_hbm="64KiB")}, "max_hbm"),
        ({"hbm": "1MiB", "device": "cuda:0"}, "device"),
        ({"hbm": "1 furlong"}, "hbm"),
        ({"hbm": "1MiB", "instance": "a/b"}, "instance"),
    ]:
        with pytest.raises(ConfigError, match=word):
            MemPool(layout, **settings)  # type: ignore[arg-type]
    for bad in ({"page_bytes": 5000}, {"page_bytes": 1024}, {"copy_threads": 0}):
        with pytest.raises(ConfigError):
            PoolConfig(**bad)


def test_another_pools_blocks_are_unknown(make_pool: MakePool) -> None:
    one, other = make_pool(4), make_pool(4)
    mine, theirs = one.alloc(2), other.alloc(2)
    assert set(mine.array.tolist()).isdisjoint(theirs.array.tolist())
    for call in (one.free, one.retain, one.seal, one.slots, one.tiers, one.swap_in):
        with pytest.raises(UnknownBlock, match="another pool"):
            call(theirs)
    for call in (one.free, one.retain, one.seal, one.slots, one.tiers, one.swap_in):
        with pytest.raises((UnknownBlock, StaleHandle), match="pool"):
            call(theirs.array)  # bare handles say it too
        with pytest.raises(UnknownBlock, match="64 bits"):
            call([-1])
    assert other.stats().tiers[Tier.HBM].active == one.stats().tiers[Tier.HBM].active == 2


def test_bare_handles_of_an_earlier_life_are_told_from_this_ones(layout: KVLayout) -> None:
    def life() -> list[int]:
        with MemPool(layout, instance="reborn", hbm="64KiB") as pool:
            for handle in earlier:
                for call in (pool.free, pool.retain, pool.seal, pool.tiers):
                    with pytest.raises((UnknownBlock, StaleHandle)):
                        call([handle])
            blocks = pool.alloc(8)
            for handle in earlier:
                with pytest.raises((UnknownBlock, StaleHandle)):
                    pool.free([handle])
            pool.check()
            return blocks.array.tolist()

    earlier: list[int] = []
    for _ in range(5):
        earlier += life()
    assert len(set(earlier)) == 40


def test_double_free_raises_and_changes_nothing(make_pool: MakePool) -> None:
    pool = make_pool(4)
    blocks = pool.alloc(3)
    pool.free(blocks[:1])
    with pytest.raises(StaleHandle) as error:
        pool.free(blocks)
    assert error.value.generation == blocks[0] >> 32
    assert error.value.current == error.value.generation + 1
    assert pool.stats().tiers[Tier.HBM].active == 2
    again = pool.alloc(1)
    assert again[0] != blocks[0]
    assert again[0] & 0xFFFFFFFF == blocks[0] & 0xFFFFFFFF


# --- index ----------------------------------------------------------------------------------------------------


def test_only_whole_sealed_blocks_are_indexed(make_pool: MakePool) -> None:
    pool = make_pool(8)
    blocks = pool.alloc(3)
    with pytest.raises(NotSealed):
        pool.insert(list(range(12)), blocks)
    assert len(pool.match(list(range(12))).blocks) == 0
    pool.seal(blocks)
    assert pool.insert(list(range(10)), blocks).num_tokens == 8  # the third is partial
    with pool.match(list(range(12))) as hit:
        assert hit.blocks == blocks[:2]
        assert hit.num_tokens == 8
        assert hit.tiers.tolist() == [1, 1]
    pool.free(blocks)
    tier = pool.stats().tiers[Tier.HBM]
    assert (tier.historical, tier.free, tier.active) == (2, 6, 0)


def test_duplicates_stay_the_callers(make_pool: MakePool, remember: Remember) -> None:
    pool = make_pool(8)
    first = remember(pool, prompt(1, 2))
    blocks = pool.alloc(3)
    pool.seal(blocks)
    result = pool.insert(prompt(1, 2) + [7] * 4, blocks)
    assert result.num_tokens == 12
    assert result.surplus.tolist() == list(blocks[:2])
    pool.free(blocks)
    with pool.match(prompt(1, 2) + [7] * 4) as hit:
        assert hit.blocks == first + blocks[2:]
    assert pool.stats().tiers[Tier.HBM].historical == 3


def test_a_block_has_one_place_in_the_index(make_pool: MakePool) -> None:
    pool = make_pool(8)
    blocks = pool.alloc(2)
    pool.seal(blocks)
    pool.insert(prompt(1, 2), blocks)
    pool.insert(prompt(1, 2), blocks)  # the same again is harmless
    with pytest.raises(ConfigError, match="another prefix"):
        pool.insert(prompt(2, 2), blocks)
    with pytest.raises(ConfigError, match="twice"):
        pool.insert(prompt(3, 2), blocks[:1] + blocks[:1])
    other = pool.namespace(Identity(model="m", salt=b"tenant"))
    with pytest.raises(ConfigError, match="another prefix"):
        pool.insert(prompt(1, 2), blocks, other)


def test_identities_do_not_share(make_pool: MakePool, remember: Remember) -> None:
    pool = make_pool(8)
    remember(pool, prompt(1, 2))
    ns = pool.namespace(Identity(model="other"))
    assert pool.match(prompt(1, 2), ns).num_tokens == 0
    assert pool.namespace(Identity(model="other")) == ns


def test_delete_keeps_what_others_share(make_pool: MakePool, remember: Remember) -> None:
    pool = make_pool(8)
    remember(pool, [1] * 4 + [2] * 4)
    blocks = pool.alloc(2)
    pool.seal(blocks)
    pool.insert([1] * 4 + [3] * 4, blocks)
    pool.free(blocks)
    assert pool.delete([1] * 4 + [2] * 4) == 1
    with pool.match([1] * 4 + [3] * 4) as hit:
        assert hit.num_tokens == 8
    assert pool.stats().events["deleted"] == 1


# --- reported faults --------------------------------------------------------------------------------------------


def test_c1_full_of_history_evicts_and_full_of_pins_says_so(make_pool: MakePool, remember: Remember) -> None:
    pool = make_pool(8)
    for seed in range(4):
        remember(pool, prompt(seed, 2))
    assert len(pool.alloc(3)) == 3
    assert pool.stats().events == {"evicted": 3}
    with pool.match(prompt(0, 2)) as gone, pool.match(prompt(1, 2)) as half:
        assert (gone.num_tokens, half.num_tokens) == (0, 4), "oldest leaves first"
    hit = pool.match(prompt(3, 2))
    started = time.perf_counter()
    with pytest.raises(OutOfBlocks) as error:
        pool.alloc(8)
    assert time.perf_counter() - started < 0.1
    assert (error.value.needed, error.value.free, error.value.evictable, error.value.pinned) == (8, 0, 3, 5)
    assert pool.stats().events == {"evicted": 3}, "nothing is evicted for a request that cannot be met"
    hit.close()


def test_c2_what_was_freed_in_pieces_is_given_as_a_whole(make_pool: MakePool) -> None:
    pool = make_pool(64)
    small, large = [], []
    for _ in range(16):
        small.append(pool.alloc(1))
        large.append(pool.alloc(3))
    for blocks in small:
        pool.free(blocks)
    assert pool.stats().tiers[Tier.HBM].largest_run == 1
    assert len(pool.alloc(16)) == 16
    with pytest.raises(OutOfBlocks):
        pool.alloc(1)
    pool.free(large[0])
    assert len(pool.alloc(3)) == 3


def test_an_absurd_request_costs_no_memory(make_pool: MakePool) -> None:
    pool = make_pool(8)
    for num_blocks in (9, 10**9, 10**15, 1 << 70):
        with pytest.raises(OutOfBlocks) as error:
            pool.alloc(num_blocks)
        assert error.value.needed == num_blocks


@pytest.mark.slow
def test_c3_200_000_operations_at_full_occupancy(make_pool: MakePool) -> None:
    pool = make_pool(8)
    rng = random.Random(3)
    held: list[Blocks] = []
    for step in range(200_000):
        choice = rng.random()
        if choice < 0.4:
            n = rng.randrange(4)
            tier = pool.stats().tiers[Tier.HBM]
            if n <= tier.free + tier.evictable:
                held.append(pool.alloc(n))
            else:
                with pytest.raises(OutOfBlocks):
                    pool.alloc(n)
        elif choice < 0.8 and held:
            pool.free(held.pop(rng.randrange(len(held))))
        elif choice < 0.9 and held:
            blocks = held[rng.randrange(len(held))]
            tokens = [int(handle) & 0x7FFF for handle in blocks for _ in range(4)]
            pool.seal(blocks)
            with contextlib.suppress(ConfigError):  # indexed elsewhere by an earlier step
                pool.insert(tokens, blocks)
        else:
            hit = pool.match(prompt(rng.randrange(4), 2))
            hit.close()
        if step % 1000 == 0:
            pool.check()
    for blocks in held:
        pool.free(blocks)
    assert pool.stats().tiers[Tier.HBM].active == 0


@pytest.mark.parametrize("abort", ["before", "between", "twice", "after"])
def test_c4_an_aborted_request_leaves_no_pin(make_pool: MakePool, remember: Remember, abort: str) -> None:
    pool = make_pool(12)
    remember(pool, prompt(1, 10))
    hit = pool.match(prompt(1, 10))
    if abort != "before":
        used = hit.blocks[:4]
        pool.retain(used)
        if abort == "between":
            hit.close()
        pool.free(used)
    hit.close()
    if abort == "twice":
        hit.close()
    if abort == "after":
        with pytest.raises(ConfigError):
            hit.take()
    tier = pool.stats().tiers[Tier.HBM]
    assert (tier.pinned, tier.evictable) == (0, 10)
    assert len(pool.alloc(12)) == 12


def test_c5_a_partly_used_prefix_hits_again(make_pool: MakePool, remember: Remember, read: Callable[..., Any]) -> None:
    pool = make_pool(6, 8)
    remember(pool, prompt(1, 6), 1)
    assert pool.swap_out(6) == 6
    hits = 0
    for _ in range(4):
        with pool.match(prompt(1, 6)) as hit:
            pool.swap_in(hit.blocks[:3])
            assert read(pool, hit.blocks[:3]) == [1, 2, 3]
            hits += hit.num_tokens == 24
        pool.swap_out(6)
    assert hits == 4


def test_c10_a_full_lower_tier_keeps_the_upper_copy(make_pool: MakePool, remember: Remember) -> None:
    pool = make_pool(4, 2)
    pinned = pool.alloc(2, Tier.DRAM)
    blocks = remember(pool, prompt(1, 4))
    assert pool.swap_out(4) == 0
    assert pool.tiers(blocks).tolist() == [1] * 4
    assert pool.stats().events.get("demoted", 0) == pool.stats().events.get("swapped_out", 0) == 0
    pool.free(pinned)
    assert pool.swap_out(4) == 2


def test_c13_nothing_in_nothing_out(make_pool: MakePool) -> None:
    pool = make_pool(4, 4)
    nothing = pool.alloc(0)
    for call in (pool.free, pool.retain, pool.seal):
        call(nothing)
    assert len(pool.slots(nothing)) == pool.swap_in(nothing) == pool.swap_out(0) == 0
    for tokens in ([], [1], [1, 2, 3]):
        with pool.match(tokens) as hit:
            assert len(hit.blocks) == hit.num_tokens == 0
        assert pool.insert(tokens, nothing).num_tokens == 0
        assert pool.delete(tokens) == 0
    with pytest.raises(ValueError, match="negative"):
        pool.alloc(-1)


# --- tiers ------------------------------------------------------------------------------------------------------


def test_history_is_demoted_before_it_is_dropped(
    make_pool: MakePool, remember: Remember, read: Callable[..., Any]
) -> None:
    pool = make_pool(4, 4)
    old = remember(pool, prompt(1, 4), 10)
    remember(pool, prompt(2, 2), 20)
    assert pool.tiers(old).tolist() == [1, 1, 2, 2]  # from the end of the prompt
    with pool.match(prompt(1, 4)) as hit:
        assert hit.blocks == old
        assert read(pool, hit.blocks) == [10, 11, 12, 13]
        assert hit.tiers.tolist() == [1, 1, 2, 2]
    remember(pool, prompt(3, 4), 30)
    remember(pool, prompt(4, 4), 40)
    assert pool.stats().events["evicted"] > 0
    with pool.match(prompt(4, 4)) as hit:
        assert hit.num_tokens == 16


def test_swap_in_is_all_or_nothing(make_pool: MakePool, remember: Remember) -> None:
    pool = make_pool(4, 4)
    blocks = remember(pool, prompt(1, 4))
    assert pool.swap_out(4) == 4
    busy = pool.alloc(2)
    with pytest.raises(OutOfBlocks):
        pool.swap_in(blocks)
    assert pool.tiers(blocks).tolist() == [2] * 4
    pool.free(busy)
    assert pool.swap_in(blocks) == 4
    assert pool.tiers(blocks).tolist() == [1] * 4
    assert pool.swap_in(blocks + blocks) == 0


def test_a_hidden_block_goes_with_the_leaf_that_hides_it(make_pool: MakePool, remember: Remember) -> None:
    pool = make_pool(4, 4)
    blocks = remember(pool, prompt(1, 4))
    pool.swap_out(4)
    pool.swap_in(blocks[2:])  # inner blocks in DRAM, leaves in HBM
    assert len(pool.alloc(4, Tier.DRAM)) == 4
    pool.check()


def test_without_dram_there_is_no_swapping(make_pool: MakePool) -> None:
    pool = make_pool(4)
    with pytest.raises(ConfigError, match="dram"):
        pool.swap_out(1)
    with pytest.raises(ConfigError, match="dram"):
        pool.alloc(1, Tier.DRAM)
    with pytest.raises(ConfigError, match="dram"):
        pool.resize(dram="1MiB")


# --- hits and warnings --------------------------------------------------------------------------------------------


def test_a_leaked_hit_and_a_leaked_pool_warn(layout: KVLayout) -> None:
    pool = MemPool(layout, hbm="1MiB")
    blocks = pool.alloc(1)
    pool.seal(blocks)
    pool.insert([1, 2, 3, 4], blocks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pool.match([1, 2, 3, 4])
        del pool
        gc.collect()
    ours = [str(w.message) for w in caught if str(w.message).startswith("poolweave:")]
    assert len(ours) == 2
    assert "1 blocks" in ours[0]
    assert "pool" in ours[1]


def test_taken_references_are_the_callers(make_pool: MakePool, remember: Remember) -> None:
    pool = make_pool(4)
    remember(pool, prompt(1, 2))
    with pool.match(prompt(1, 2)) as hit:
        blocks = hit.take()
    assert pool.stats().tiers[Tier.HBM].pinned == 2
    pool.free(blocks)
    assert pool.stats().tiers[Tier.HBM].pinned == 0


def test_private_blocks_are_not_lent(make_pool: MakePool) -> None:
    pool = make_pool(4)
    blocks = pool.alloc(1)
    pool.seal(blocks)
    pool._table.set_private(blocks.array)
    with pytest.raises(PrivateBlock):
        pool._links._store.lend(blocks.array)
