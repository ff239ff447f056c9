"""One arena under several pools and processes: one budget, nothing lost when a process dies."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.context import SpawnProcess

import numpy as np
import pytest

from poolweave.errors import ConfigError, OutOfBlocks, OutOfPages
from poolweave.mempool import Arena, Blocks, MemPool, PoolConfig
from poolweave.transfer import KVLayout
from poolweave.types import Tier

PAGE = 64 << 10
SMALL = KVLayout(num_layers=2, kv_heads=1, head_dim=8, block_tokens=4, dtype="float32")  # 512 bytes
LARGE = KVLayout(num_layers=6, kv_heads=2, head_dim=32, block_tokens=16, dtype="float32")  # 48 KiB, across page breaks
spawn = multiprocessing.get_context("spawn")


def free_pages(arena: Arena) -> int:
    stats = arena.stats()
    return (stats.budget_bytes - stats.held_bytes) // PAGE


def test_two_layouts_draw_on_one_budget() -> None:
    arena = Arena(16 * PAGE, page_bytes=PAGE)
    with MemPool(SMALL, hbm=arena) as small, MemPool(LARGE, hbm=arena) as large:
        assert arena.stats().held_bytes == 0
        few, many = small.alloc(200), large.alloc(18)
        small.view()[small.slots(few)] = 1
        large.view()[large.slots(many)] = 2
        assert small.stats().tiers[Tier.HBM].mapped_bytes == 2 * PAGE
        assert large.stats().tiers[Tier.HBM].mapped_bytes == 14 * PAGE
        assert free_pages(arena) == 0
        with pytest.raises(OutOfBlocks):
            small.alloc(57)
        assert len(small.alloc(56)) == 56
        assert small.view()[small.slots(few)].max() == 1
        assert large.view()[large.slots(many)].min() == 2
        large.free(many)
        large.trim()
        assert free_pages(arena) == 14
        assert len(small.alloc(1000)) == 1000
        for pool in (small, large):
            pool.check()


def test_memory_comes_before_eviction_and_eviction_before_failure() -> None:
    arena = Arena(2 * PAGE, page_bytes=PAGE)
    with MemPool(SMALL, hbm=arena) as pool:
        blocks = pool.alloc(100)
        pool.seal(blocks)
        pool.insert(list(range(400)), blocks)
        pool.free(blocks)
        held = pool.alloc(156)
        assert pool.stats().events == {}
        pool.alloc(100)
        assert pool.stats().events == {"evicted": 100}
        pool.free(held)


def test_resizing_caps_what_a_pool_draws() -> None:
    arena = Arena(8 * PAGE, page_bytes=PAGE)
    with MemPool(SMALL, hbm=arena) as pool:
        pool.resize(hbm=PAGE)
        blocks = pool.alloc(128)
        with pytest.raises(OutOfBlocks):
            pool.alloc(1)
        pool.resize(hbm=2 * PAGE)
        more = pool.alloc(128)
        pool.resize(hbm=PAGE)
        pool.free(more)
        assert free_pages(arena) == 7
        with pytest.raises(OutOfBlocks):
            pool.alloc(1)
        pool.free(blocks)


def test_closing_gives_all_pages_back_unless_a_view_holds_them() -> None:
    arena = Arena(4 * PAGE, page_bytes=PAGE)
    pool = MemPool(SMALL, hbm=arena)
    pool.alloc(300)
    view = pool.view()
    view[0] = 3
    pool.close()
    assert free_pages(arena) == 1
    assert view[0].max() == 3
    del view
    assert free_pages(arena) == 4


def test_what_a_shared_tier_cannot_do() -> None:
    arena = Arena(4 * PAGE, page_bytes=PAGE)
    layered = KVLayout(num_layers=2, kv_heads=1, head_dim=8, block_tokens=4, dtype="float32", order="layered")
    with pytest.raises(ConfigError, match="aggregated"):
        MemPool(layered, hbm=arena)
    sole = arena.reserve(PAGE, sole=True)
    with pytest.raises(ConfigError, match="alone"):
        MemPool(SMALL, hbm=arena)
    del sole
    MemPool(SMALL, hbm=arena).close()


def test_swapping_into_a_shared_tier_extends_it() -> None:
    arena = Arena(4 * PAGE, page_bytes=PAGE)
    with MemPool(SMALL, hbm=64 * 512, dram=arena, config=PoolConfig(page_bytes=PAGE)) as pool:
        for seed in range(8):
            blocks = pool.alloc(64)
            pool.view()[pool.slots(blocks)] = seed
            pool.seal(blocks)
            pool.insert([seed] * 256, blocks)
            pool.free(blocks)
        assert pool.stats().events == {"demoted": 448}
        with pool.match([0] * 256) as hit:
            assert hit.num_tokens == 256
            assert pool.view(Tier.DRAM)[pool.slots(hit.blocks, Tier.DRAM)].max() == 0
        pool.check()


# --- processes ----------------------------------------------------------------------------------------------------


def hold_pages(arena: Arena, ready: object) -> None:
    span = arena.reserve(16 * PAGE)
    span.map(0, 5)
    span.buffer()[: 5 * PAGE] = 7
    ready.put(os.getpid())  # type: ignore[attr-defined]
    time.sleep(600)


@pytest.mark.multiproc
def test_pages_of_a_killed_process_come_back_when_they_are_needed() -> None:
    arena = Arena(8 * PAGE, page_bytes=PAGE)
    ready = spawn.SimpleQueue()
    child = spawn.Process(target=hold_pages, args=(arena, ready))
    child.start()
    ready.get()
    span = arena.reserve(16 * PAGE)
    with pytest.raises(OutOfPages) as error:
        span.map(0, 4)
    assert error.value.free == 3
    child.kill()
    child.join()
    span.map(0, 8)
    assert arena.stats().processes == 1
    arena.check()


def churn(arena: Arena, seed: int) -> None:
    """Map, write, verify and unmap runs of pages, and blocks of a pool, until killed. Exits with 1 on a wrong byte."""
    rng, stamp = random.Random(seed), seed % 250 + 1
    layout = SMALL if seed % 2 else LARGE
    while True:
        span = arena.reserve(64 * PAGE)
        with MemPool(layout, hbm=arena) as pool:
            for _ in range(20):
                first, count = rng.randrange(40), rng.randrange(1, 20)
                blocks = Blocks.empty()
                try:
                    span.map(first, count)
                    blocks = pool.alloc(rng.randrange(1, 6 * PAGE // layout.block_bytes))
                except (OutOfPages, OutOfBlocks):
                    if not span.num_mapped:
                        continue
                mine = span.buffer()[first * PAGE : (first + count) * PAGE : 512]
                mine[:] = stamp
                pool.view()[pool.slots(blocks)] = stamp
                time.sleep(rng.random() / 500)
                if mine.min() != stamp or not np.all(pool.view()[pool.slots(blocks)] == stamp):
                    os._exit(1)
                pool.free(blocks)
                pool.trim()
                span.unmap(first, count)


def run_and_kill(seconds: float, seed: int) -> int:
    arena = Arena(48 * PAGE, page_bytes=PAGE)
    rng = random.Random(seed)
    processes: list[SpawnProcess] = []
    kills = 0
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            while len(processes) < 4:
                processes.append(spawn.Process(target=churn, args=(arena, seed + kills + len(processes))))
                processes[-1].start()
            time.sleep(rng.random() * 2)
            victim = processes.pop(rng.randrange(4))
            assert victim.is_alive(), f"a process ended by itself with {victim.exitcode}: it saw another's bytes"
            os.kill(victim.pid or 0, signal.SIGKILL)
            victim.join()
            kills += 1
            arena.check()
        assert all(process.is_alive() for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    arena.reap()
    stats = arena.stats()
    assert (stats.held_bytes, stats.processes) == (0, 1)
    arena.check()
    span = arena.reserve(48 * PAGE, sole=False)
    span.map(0, 48)  # every page is there to be had
    return kills


@pytest.mark.multiproc
def test_four_processes_and_kills_lose_no_page() -> None:
    assert run_and_kill(6, seed=1) >= 1


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_minute_of_four_processes_and_kills_loses_no_page() -> None:
    assert run_and_kill(60, seed=2) >= 10


def test_closing_the_pool_leaves_other_ranges_alone(make_pool: Callable[..., MemPool]) -> None:
    arena = Arena(4 * PAGE, page_bytes=PAGE)
    span = arena.reserve(PAGE)
    span.map(0, 1)
    span.buffer()[:] = 4
    MemPool(SMALL, hbm=arena).close()
    assert span.buffer().min() == 4
