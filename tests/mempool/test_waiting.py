"""Waiting for blocks: C7 (the GIL is free meanwhile), order among waiters, tasks, timeouts, closing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
from ref_waiting import until

from poolweave.errors import AllocTimeout, InstanceClosed, OutOfBlocks
from poolweave.mempool import Blocks, MemPool
from poolweave.mempool.waiters import WaitQueue
from poolweave.types import Tier

MakePool = Callable[..., MemPool]


def test_c7_a_blocking_alloc_times_out_and_lets_others_run(make_pool: MakePool) -> None:
    pool = make_pool(4)
    pool.alloc(4)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.monotonic())
            stop.wait(0.002)

    ticker = threading.Thread(target=tick)
    ticker.start()
    with pytest.raises(TimeoutError) as error:
        pool.alloc(1, timeout=0.5)
    stop.set()
    ticker.join()
    assert isinstance(error.value, AllocTimeout)
    assert (error.value.needed, error.value.free, error.value.pinned) == (1, 0, 4)
    assert len(ticks) > 5, "the ticker stood still"
    assert pool.stats().waiting == 0


def test_what_can_never_fit_is_refused_at_once(make_pool: MakePool) -> None:
    pool = make_pool(4)
    with pytest.raises(OutOfBlocks) as error:
        pool.alloc(5, timeout=60)
    assert not isinstance(error.value, TimeoutError)


def test_waiters_are_served_in_order_even_when_the_later_ones_want_less(make_pool: MakePool) -> None:
    pool = make_pool(4)
    held = pool.alloc(4)
    served: list[int] = []

    def want(n: int) -> None:
        blocks = pool.alloc(n, timeout=30)
        served.append(n)
        pool.free(blocks)

    threads = []
    for waiting, n in enumerate((3, 1, 2), start=1):
        threads.append(threading.Thread(target=want, args=(n,)))
        threads[-1].start()
        until(lambda waiting=waiting: pool.stats().waiting == waiting)  # type: ignore[misc]
    pool.free(held[:1])
    pool.free(held[1:2])
    assert served == [], "a later and smaller request overtook"
    pool.free(held[2:])
    for thread in threads:
        thread.join()
    assert served == [3, 1, 2]
    assert pool.stats().tiers[Tier.HBM].free == 4


def test_history_that_becomes_evictable_wakes_a_waiter(make_pool: MakePool) -> None:
    pool = make_pool(2)
    blocks = pool.alloc(2)
    pool.seal(blocks)
    pool.insert(list(range(8)), blocks)
    got: list[Blocks] = []
    thread = threading.Thread(target=lambda: got.append(pool.alloc(2, timeout=30)))
    thread.start()
    until(lambda: pool.stats().waiting == 1)
    pool.free(blocks)
    thread.join()
    assert len(got[0]) == 2


def test_growing_wakes_a_waiter(make_pool: MakePool, layout: object) -> None:
    pool = make_pool(1)
    pool.alloc(1)
    got: list[Blocks] = []
    pool.resize(hbm=3 * pool.layout.block_bytes)
    held = pool.alloc(2)
    thread = threading.Thread(target=lambda: got.append(pool.alloc(2, timeout=30)))
    thread.start()
    until(lambda: pool.stats().waiting == 1)
    pool.resize(hbm=5 * pool.layout.block_bytes)
    thread.join()
    pool.free(got[0])
    pool.free(held)


def test_closing_ends_the_waiting(make_pool: MakePool) -> None:
    pool = make_pool(1)
    pool.alloc(1)
    ended: list[type[BaseException]] = []

    def want() -> None:
        with pytest.raises(InstanceClosed) as error:
            pool.alloc(1, timeout=30)
        ended.append(error.type)

    thread = threading.Thread(target=want)
    thread.start()
    until(lambda: pool.stats().waiting == 1)
    pool.close()
    thread.join()
    assert ended == [InstanceClosed]


def test_tasks_wait_for_each_other(make_pool: MakePool) -> None:
    pool = make_pool(4)

    async def run() -> list[int]:
        held = await pool.alloc_async(4)
        order: list[int] = []

        async def want(n: int) -> None:
            blocks = await pool.alloc_async(n)
            order.append(n)
            pool.free(blocks)

        tasks = [asyncio.create_task(want(n)) for n in (4, 1, 2)]
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await pool.alloc_async(1, timeout=0.01)
        tasks[1].cancel()
        pool.free(held)
        await asyncio.gather(*tasks, return_exceptions=True)
        return order

    assert asyncio.run(run()) == [4, 2]
    assert pool.stats().waiting == 0
    assert pool.stats().tiers[Tier.HBM].free == 4


def test_a_thread_frees_for_a_task(make_pool: MakePool) -> None:
    pool = make_pool(2)
    held = pool.alloc(2)

    def free_when_waited_for() -> None:
        until(lambda: pool.stats().waiting == 1)
        pool.free(held)

    thread = threading.Thread(target=free_when_waited_for)
    thread.start()
    blocks = asyncio.run(pool.alloc_async(2, timeout=30))
    thread.join()
    assert len(blocks) == 2


def test_a_queue_wakes_only_the_first() -> None:
    queue, woken = WaitQueue(), []
    first = queue.enter(lambda: woken.append(1))
    second = queue.enter(lambda: woken.append(2))
    queue.notify()
    assert woken == [1]
    assert queue.may_try(first)
    assert not queue.may_try(second)
    queue.leave(first)
    assert woken == [1, 2]
    assert queue.may_try(second)
    queue.notify_all()
    queue.leave(second)
    assert woken == [1, 2, 2]
    assert not queue


@pytest.mark.parametrize("timeout", [None, 1.0])
def test_any_number_is_answered_with_figures(make_pool: MakePool, timeout: float | None) -> None:
    """No array is made for what can never be: 10**12 handles would take terabytes."""
    pool = make_pool(8)
    for number in (9, 10**12, 1 << 62):
        with pytest.raises(OutOfBlocks) as caught:
            pool.alloc(number, timeout=timeout)
        assert (caught.value.needed, caught.value.free) == (number, 8)
    with pytest.raises(ValueError, match="got -1"):
        pool.alloc(-1, timeout=timeout)


def test_a_closed_pool_says_that_it_is_closed(make_pool: MakePool) -> None:
    pool = make_pool(8, 8)
    blocks = pool.alloc(1)
    pool.close()
    calls: list[Callable[[], object]] = [
        lambda: pool.alloc(1),
        lambda: pool.alloc(1, timeout=1),
        lambda: pool.alloc(10**9),
        lambda: pool.swap_out(1),
        lambda: pool.swap_in(blocks),
        lambda: pool.resize(hbm="1MiB"),
        lambda: pool.free(blocks),
        pool.trim,
        pool.stats,
    ]
    for call in calls:
        with pytest.raises(InstanceClosed):
            call()
