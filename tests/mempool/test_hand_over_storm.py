"""Pools of one arena hand blocks over and on while processes are killed: no byte is wrong, no page is lost."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import numpy as np
import pytest

from poolweave.errors import PoolweaveError
from poolweave.mempool import Arena, MemPool, PoolConfig
from poolweave.transfer import KVLayout, TransferConfig

PAGE = 64 << 10
LAYOUT = KVLayout(num_layers=3, kv_heads=2, head_dim=16, block_tokens=8, dtype="float32")  # 6 KiB: 10.7 a page
NUM_PROCESSES, NUM_KEYS, MOST_BLOCKS = 3, 12, 30
spawn = multiprocessing.get_context("spawn")


def tokens_of(key: int, num_blocks: int) -> list[int]:
    return [key * 1000 + place for place in range(num_blocks * LAYOUT.block_tokens)]


def expected(key: int, num_blocks: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return (np.arange(num_blocks, dtype=np.float32) + 1000 * (key + 1)).reshape(-1, 1, 1, 1, 1, 1)


def verify(pool: MemPool, key: int, others: list[str], rng: random.Random) -> None:
    """What is indexed under a key is that key's KV, whoever computed it and wherever it lies."""
    with pool.match(tokens_of(key, MOST_BLOCKS)) as hit:
        if not (pool.view()[pool.slots(hit.blocks)] == expected(key, len(hit.blocks))).all():
            os._exit(3)
        if len(hit.blocks) and rng.random() < 0.5:  # hand it on
            with contextlib.suppress(PoolweaveError):
                tokens = tokens_of(key, len(hit.blocks))
                pool.transfer_with_insert(rng.choice(others), hit.blocks, tokens).result(5)
    if rng.random() < 0.3:
        pool.delete(tokens_of(key, MOST_BLOCKS))
        pool.trim()


def live(arena: Arena, name: str, others: list[str], seed: int, turns: Connection) -> None:
    """Compute, hand over, verify and forget, until killed."""
    rng = random.Random(seed)
    config = PoolConfig(transfer=TransferConfig(listen="arena", lease_s=5))
    with MemPool(LAYOUT, instance=name, hbm=arena, config=config) as pool:
        _ = pool.address
        for other in others:
            pool.connect(other, f"arena://{arena.id:016x}/{other}")
        while True:
            key, count = rng.randrange(NUM_KEYS), rng.randrange(1, MOST_BLOCKS)
            with contextlib.suppress(PoolweaveError):
                blocks = pool.alloc(count)
                pool.view()[pool.slots(blocks)] = expected(key, count)
                pool.seal(blocks)
                try:
                    tokens = tokens_of(key, count)
                    report = pool.transfer_with_insert(rng.choice(others), blocks, tokens).result(5)
                    turns.send(report.pulled_blocks)
                finally:
                    pool.free(blocks)
            verify(pool, rng.randrange(NUM_KEYS), others, rng)


def storm(kills: int, seed: int) -> None:
    arena = Arena(48 * PAGE, page_bytes=PAGE)
    rng = random.Random(seed)
    names = [f"storm-{os.getpid()}-{number}" for number in range(NUM_PROCESSES)]
    processes: dict[str, SpawnProcess] = {}
    turns: dict[str, Connection] = {}

    def start(name: str) -> None:
        others = [other for other in names if other != name]
        turns[name], theirs = spawn.Pipe(duplex=False)
        processes[name] = spawn.Process(target=live, args=(arena, name, others, rng.randrange(1 << 30), theirs))
        processes[name].start()
        theirs.close()

    def watch(transfers: int) -> None:
        """Until so many have been made. An end of a pipe is a process that ended by itself."""
        while transfers > 0:
            for one in wait(list(turns.values())):
                try:
                    one.recv()  # type: ignore[union-attr]
                except EOFError:
                    name = next(name for name, turn in turns.items() if turn is one)
                    processes[name].join()
                    pytest.fail(f"a process ended by itself with {processes[name].exitcode}; 3 is for another's bytes")
                transfers -= 1

    try:
        for name in names:
            start(name)
        for _ in range(kills):
            watch(60)
            victim = rng.choice(names)
            os.kill(processes[victim].pid or 0, signal.SIGKILL)
            processes[victim].join()
            turns.pop(victim).close()
            arena.check()
            start(victim)
        watch(60)
    finally:
        for process in processes.values():
            process.kill()
            process.join()
        for turn in turns.values():
            turn.close()
    arena.reap()
    arena.check()
    stats = arena.stats()
    assert (stats.held_bytes, stats.guest_bytes, stats.orphan_bytes, stats.processes) == (0, 0, 0, 1)
    arena.reserve(48 * PAGE).map(0, 48)  # every page is there to be had


@pytest.mark.multiproc
def test_a_kill_among_pools_that_hand_over() -> None:
    storm(1, seed=1)


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_thirty_kills_among_pools_that_hand_over() -> None:
    storm(30, seed=2)
