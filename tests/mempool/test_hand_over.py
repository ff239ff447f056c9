"""Pools of one arena hand blocks over where they lie: who may reuse what, and what a death leaves behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from poolweave.errors import ConfigError, TransferFailed
from poolweave.mempool import Arena, Blocks, MemPool, PoolConfig
from poolweave.mempool.guests import NUM_WINDOWS
from poolweave.transfer import KVLayout, TransferConfig
from poolweave.types import Tier

PAGE = 64 << 10
LAYOUT = KVLayout(num_layers=3, kv_heads=2, head_dim=16, block_tokens=8, dtype="float32")  # 6 KiB: 10.7 a page
TOKENS = list(range(8 * 24 + 4))  # 24 whole blocks and a half
WAIT_S = 60
spawn = multiprocessing.get_context("spawn")


def open_pool(arena: Arena, **settings: Any) -> MemPool:
    return MemPool(LAYOUT, hbm=arena, config=PoolConfig(transfer=TransferConfig(listen=("arena", "tcp"), **settings)))


@pytest.fixture
def arena() -> Iterator[Arena]:
    before = set(os.listdir("/dev/shm"))
    one = Arena(64 * PAGE, page_bytes=PAGE)
    yield one
    one.reap()
    one.check()
    stats = one.stats()
    assert (stats.held_bytes, stats.guest_bytes, stats.orphan_bytes) == (0, 0, 0)
    assert set(os.listdir("/dev/shm")) <= before


def written(pool: MemPool, num_blocks: int = 25, seed: int = 1) -> Blocks:
    blocks = pool.alloc(num_blocks)
    pool.view()[pool.slots(blocks)] = (np.arange(num_blocks) + seed).reshape(-1, 1, 1, 1, 1, 1)
    pool.seal(blocks)
    return blocks


def values(pool: MemPool, blocks: Blocks) -> list[float]:
    rows = pool.view()[pool.slots(blocks)].reshape(len(blocks), -1)
    assert (rows.min(1) == rows.max(1)).all()
    return [float(value) for value in rows[:, 0]]


def send(source: MemPool, target: MemPool, blocks: Blocks, tag: bytes = b"t", **settings: Any) -> Any:
    source.connect(target.instance, target.addresses)
    return source.transfer_with_insert(target.instance, blocks, TOKENS, tag=tag, **settings)


def hbm(pool: MemPool) -> Any:
    return pool.stats().tiers[Tier.HBM]


def test_whole_blocks_stay_where_they_are(arena: Arena) -> None:
    with open_pool(arena) as source, open_pool(arena, hand_over="require") as target:
        blocks = written(source)
        held = arena.stats().held_bytes
        report = send(source, target, blocks).result(WAIT_S)
        assert (report.pulled_blocks, report.nbytes) == (
            25,
            LAYOUT.block_bytes,
        )  # the half block is the receiver's to fill
        with target.receive(b"t", WAIT_S) as got:
            assert values(target, got.blocks) == [float(value) for value in range(1, 26)]
            assert arena.stats().held_bytes == held + PAGE
            assert (hbm(target).guests, hbm(target).active) == (24, 1)
            assert hbm(source).handed == 25  # the half block shares its page with one that has a guest
            assert target.stats().transfer.receiving.handed == 24
            assert source.stats().transfer.sending.transports == {target.instance: ("auto", "arena")}
        source.check()
        target.check()


def test_the_sender_reuses_nothing_before_the_last_guest_has_left(arena: Arena) -> None:
    with open_pool(arena) as source, open_pool(arena) as target:
        blocks = written(source)
        source.insert(TOKENS, blocks)
        send(source, target, blocks).result(WAIT_S)
        target.receive(b"t", WAIT_S).close()
        source.free(blocks)
        source.delete(TOKENS)
        assert (hbm(source).handed, hbm(source).historical) == (25, 0)  # no victims either: they would make no room
        other = written(source, 300, seed=1000)
        with target.match(TOKENS) as hit:
            assert values(target, hit.blocks) == [float(value) for value in range(1, 25)]
        assert target.delete(TOKENS) == 24
        assert (hbm(source).handed, hbm(target).guests) == (0, 0)
        source.free(other)
        assert hbm(source).active == 0
        source.check()
        target.check()


def test_a_guest_may_hand_on_and_outlives_all_before_it(arena: Arena) -> None:
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(open_pool(arena)) for _ in range(3))
        blocks = written(first)
        send(first, second, blocks).result(WAIT_S)
        with second.receive(b"t", WAIT_S) as got:
            second.seal(got.blocks)
            send(second, third, got.blocks, b"u").result(WAIT_S)
        with third.receive(b"u", WAIT_S) as got:
            assert third.stats().transfer.receiving.handed == 24
            second.close()
            assert hbm(first).handed == 25
            first.close()
            assert arena.stats().orphan_bytes > 0
            assert values(third, got.blocks) == [float(value) for value in range(1, 26)]
        third.check()
        assert third.delete(TOKENS) == 24
        assert arena.stats().orphan_bytes == 0


def test_a_page_that_came_by_two_ways_is_kept_until_both_are_gone(arena: Arena) -> None:
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(open_pool(arena)) for _ in range(3))
        blocks = written(first)
        send(first, second, blocks).result(WAIT_S)
        send(first, third, blocks, b"direct").result(WAIT_S)
        with second.receive(b"t", WAIT_S) as got:
            second.connect(third.instance, third.addresses)
            second.transfer(third.instance, got.blocks[:20], tag=b"onward").result(WAIT_S)
        with third.receive(b"onward", WAIT_S) as onward:
            third.receive(b"direct", WAIT_S).close()
            assert third.delete(TOKENS) == second.delete(TOKENS) == 24
            first.free(blocks)
            written(first, 300, seed=1000)  # into pages that are free now, and no others
            assert values(third, onward.blocks) == [float(value) for value in range(1, 21)]
            third.check()
        assert hbm(first).handed == 0


def test_history_in_orphaned_pages_goes_before_an_allocation_fails(arena: Arena) -> None:
    with open_pool(arena) as target:
        with open_pool(arena) as source:
            send(source, target, written(source)).result(WAIT_S)
            target.receive(b"t", WAIT_S).close()
        most = 64 * PAGE // LAYOUT.block_bytes
        with pytest.raises(Exception, match="need"):
            target.alloc(most + 1)
        target.free(target.alloc(most))
        assert hbm(target).guests == 0
        target.trim()


@pytest.mark.parametrize("how", [{"private": True}, {"on_demand": Tier.DRAM}])
def test_what_cannot_stay_is_copied_or_refused(arena: Arena, how: dict[str, Any]) -> None:
    config = PoolConfig(page_bytes=PAGE, transfer=TransferConfig(listen="arena", hand_over="require"))
    with (
        open_pool(arena) as source,
        open_pool(arena, hand_over="off") as copying,
        MemPool(LAYOUT, hbm=arena, dram=40 * LAYOUT.block_bytes, config=config) as strict,
    ):
        blocks = written(source)
        assert send(source, copying, blocks).result(WAIT_S).nbytes == 25 * LAYOUT.block_bytes
        with copying.receive(b"t", WAIT_S) as got:
            assert values(copying, got.blocks)[-1] == 25
        with pytest.raises(TransferFailed, match="hand_over='require'"):
            send(source, strict, blocks, **how).result(WAIT_S)
        assert (hbm(source).leased, hbm(copying).guests, hbm(strict).guests) == (0, 0, 0)


def test_growing_blocks_are_seen_layer_by_layer(arena: Arena) -> None:
    with open_pool(arena) as source, open_pool(arena) as target:
        blocks = source.alloc(25)
        rows = source.slots(blocks)
        sent = send(source, target, blocks, growing=True)
        with target.follow(b"t", WAIT_S) as seen:
            for layer in range(3):
                source.view()[rows, layer] = layer + 1
                source.seal(blocks, range(layer, layer + 1))
                sent.ready(layer + 1)
                seen.wait(layer + 1, timeout=WAIT_S)
                assert (target.view()[target.slots(seen.blocks), layer] == layer + 1).all()
            assert sent.result(WAIT_S).nbytes == LAYOUT.block_bytes
            target.receive(b"t", WAIT_S).close()
        assert hbm(target).guests == 24


def test_pools_of_another_arena_are_reached_otherwise(arena: Arena) -> None:
    with open_pool(arena) as source, open_pool(Arena(64 * PAGE, page_bytes=PAGE)) as stranger:
        with pytest.raises(ConfigError, match="speaks arena"):
            source.connect(stranger.instance, stranger.address)
        assert send(source, stranger, written(source)).result(WAIT_S).nbytes == 25 * LAYOUT.block_bytes
        assert source.stats().transfer.sending.transports == {stranger.instance: ("auto", "tcp")}
        stranger.receive(b"t", WAIT_S).close()
    with pytest.raises(ConfigError, match="shared arena"):
        _ = MemPool(LAYOUT, hbm="1MiB", config=PoolConfig(transfer=TransferConfig(listen="arena"))).address


def test_beyond_its_windows_a_pool_says_so_and_its_cap_holds(arena: Arena) -> None:
    config = PoolConfig(max_hbm=2 * LAYOUT.block_bytes, transfer=TransferConfig(listen="arena"))
    with ExitStack() as stack:
        target = stack.enter_context(MemPool(LAYOUT, hbm=arena, config=config))
        for number in range(NUM_WINDOWS + 1):
            source = stack.enter_context(open_pool(arena))
            source.connect(target.instance, target.address)
            blocks = written(source, 1, seed=number)
            tokens = [number] * 8
            sent = source.transfer_with_insert(target.instance, blocks, tokens, tag=b"%d" % number)
            if number < NUM_WINDOWS:
                sent.result(WAIT_S)
                with target.receive(b"%d" % number, WAIT_S) as got:
                    assert values(target, got.blocks) == [number]
                assert hbm(target).guests == min(2, number + 1)
            else:
                with pytest.raises(TransferFailed, match="tcp"):
                    sent.result(WAIT_S)
        target.check()


# --- processes ----------------------------------------------------------------------------------------------------


def live(arena: Arena, name: str, pipe: Any) -> None:
    """A pool that sends, takes and lets go as it is told."""
    with MemPool(LAYOUT, instance=name, hbm=arena) as pool:
        pipe.send(pool.addresses)
        blocks = Blocks.empty()
        while (order := pipe.recv()) is not None:
            if order[0] == "send":
                pool.connect(order[1], order[2])
                blocks = written(pool)
                pool.transfer_with_insert(order[1], blocks, TOKENS, tag=b"t").result(WAIT_S)
            elif order[0] == "take":
                with pool.receive(b"t", WAIT_S) as got:
                    pipe.send(values(pool, got.blocks))
                    continue
            else:
                pool.delete(TOKENS)
            pipe.send(None)


class Other:
    """A pool in another process."""

    def __init__(self, arena: Arena, name: str) -> None:
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=live, args=(arena, name, theirs))
        self.process.start()
        self.name, self.addresses = name, self.pipe.recv()

    def ask(self, *order: Any) -> Any:
        self.pipe.send(order)
        assert self.pipe.poll(WAIT_S)
        return self.pipe.recv()

    def kill(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join()


@pytest.mark.multiproc
def test_a_killed_receiver_gives_its_guests_up(arena: Arena) -> None:
    with open_pool(arena) as source:
        other = Other(arena, "hand-over-target")
        source.connect(other.name, other.addresses)
        blocks = written(source)
        source.transfer_with_insert(other.name, blocks, TOKENS, tag=b"t").result(WAIT_S)
        assert other.ask("take") == [float(value) for value in range(1, 26)]
        source.free(blocks)
        assert hbm(source).handed == 25
        waiting: list[Blocks] = []
        everything = 64 * PAGE // LAYOUT.block_bytes
        thread = threading.Thread(target=lambda: waiting.append(source.alloc(everything, timeout=WAIT_S)))
        thread.start()  # it waits for what another process holds, which sends no word when it dies
        other.kill()
        thread.join(WAIT_S)
        assert [len(got) for got in waiting] == [everything]
        source.check()
        assert hbm(source).handed == 0


@pytest.mark.multiproc
def test_a_killed_sender_leaves_its_guests_their_blocks(arena: Arena) -> None:
    with open_pool(arena) as target:
        other = Other(arena, "hand-over-source")
        other.ask("send", target.instance, target.addresses)
        got = target.receive(b"t", WAIT_S)
        other.kill()
        arena.reap()
        stats = arena.stats()
        assert 0 < stats.orphan_bytes == stats.guest_bytes
        more = written(target, 300, seed=5000)  # into pages that are free now, and no others
        assert values(target, got.blocks) == [float(value) for value in range(1, 26)]
        target.free(more)
        got.close()
        target.check()
        assert target.delete(TOKENS) == 24
        assert arena.stats().orphan_bytes == 0
