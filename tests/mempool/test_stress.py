"""The stress driver runs, tells what it did, and would notice a fault; and C6 (failing reads leak nothing)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from poolweave.errors import ConfigError
from poolweave.mempool import Arena, Blocks, MemPool, stress
from poolweave.types import Tier


@pytest.mark.multiproc
def test_two_processes_on_one_arena() -> None:
    command = [sys.executable, "-m", "poolweave.mempool.stress", "--seed", "5", "--steps", "400", "--check-every", "50"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split(":")[0] for line in done.stdout.splitlines()) == ["seed 5", "seed 6"]


def test_all_operations_are_reached() -> None:
    arena = Arena(6 * stress.PAGE_BYTES, page_bytes=stress.PAGE_BYTES)
    run = stress.StressRun(stress.StressConfig(seed=9, steps=3000), arena)
    run.run()
    assert {operation.__name__ for _, operation in run._operations} < set(run.counts)
    assert run.counts["out_of_blocks"] > 0
    assert arena.stats().held_bytes == 0


def test_a_wrong_byte_is_noticed() -> None:
    arena = Arena(6 * stress.PAGE_BYTES, page_bytes=stress.PAGE_BYTES)
    run = stress.StressRun(stress.StressConfig(seed=1, steps=1), arena)
    with run.pool, run.peer:
        blocks = run._fresh(4, Tier.HBM)
        run.verify()
        run.pool.view()[run.pool.slots(blocks[2:3])] = 0
        with pytest.raises(stress.Fault):
            run.verify()


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ConfigError):
        stress.main(["--processes", "0"])


def test_c6_copies_that_fail_leave_nothing_behind(
    make_pool: Callable[..., MemPool], remember: Callable[..., Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(8, 8)
    rng = random.Random(6)
    copy = pool._space.copy

    def fail_sometimes(*arguments: Any) -> None:
        if rng.random() < 0.3:
            raise OSError("the backend failed")
        copy(*arguments)

    monkeypatch.setattr(type(pool._space), "copy", lambda self, *arguments: fail_sometimes(*arguments))
    blocks = remember(pool, list(range(32)))
    descriptors = len(os.listdir("/proc/self/fd"))
    failures = 0
    for _ in range(2000):
        try:
            pool.swap_out(rng.randrange(9))
            with pool.match(list(range(32))) as hit:
                pool.swap_in(hit.blocks)
        except OSError:
            failures += 1
    assert 300 < failures < 1500
    pool.check()
    tiers = pool.stats().tiers
    assert sum(t.historical for t in tiers.values()) == len(blocks)
    assert all((t.pinned, t.active, t.limbo, t.leased) == (0, 0, 0, 0) for t in tiers.values())
    assert sum(t.free for t in tiers.values()) == 8
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # fewer: an earlier test's pools were collected meanwhile
