"""Two pools and the transfers between them, as the facade offers them; the engine has its own tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from poolweave.errors import ConfigError, InstanceClosed, NotSealed, OutOfBlocks, PrivateBlock, TransferFailed
from poolweave.index import Identity
from poolweave.mempool import Arena, Blocks, MemPool
from poolweave.transfer import TransferConfig
from poolweave.types import Tier

MakePool = Callable[..., MemPool]
TOKENS = list(range(18))  # four whole blocks and half of one


@pytest.fixture(params=["shm", "arena", "tcp"])
def pair(request: pytest.FixtureRequest, make_pool: MakePool) -> Iterator[tuple[MemPool, MemPool]]:
    """A sender with 8 + 8 blocks and a receiver with 16 + 8, connected both ways."""
    config = TransferConfig(listen=request.param, lease_s=10)
    arena = Arena("1MiB", page_bytes=64 << 10) if request.param == "arena" else None
    sender, receiver = make_pool(8, 8, transfer=config, arena=arena), make_pool(16, 8, transfer=config, arena=arena)
    sender.connect(receiver.instance, receiver.address)
    receiver.connect(sender.instance, sender.addresses)
    yield sender, receiver
    for pool in (sender, receiver):
        assert pool.stats().tiers[Tier.HBM].leased == pool.stats().tiers[Tier.HBM].handed


def written(pool: MemPool, n: int, fill: Callable[..., None]) -> Blocks:
    blocks = pool.alloc(n)
    fill(pool, blocks, 1)
    pool.seal(blocks)
    return blocks


def test_a_prompt_arrives_indexed(pair: tuple[MemPool, MemPool], fill: Any, read: Any) -> None:
    sender, receiver = pair
    blocks = written(sender, 5, fill)
    sent = sender.transfer_with_insert(receiver.instance, blocks, TOKENS, tag=b"one")
    with receiver.receive(b"one", timeout=10) as got:
        assert read(receiver, got.blocks) == [1, 2, 3, 4, 5]
        assert (got.num_tokens, got.pulled_blocks, got.peer) == (18, 5, sender.instance)
        assert got.tokens is not None
        assert got.tokens.tolist() == TOKENS
        receiver.view()[receiver.slots(got.blocks[4:])] = 9  # the partial block is writable
    assert sent.result(10).num_blocks == 5
    with receiver.match(TOKENS) as hit:
        assert hit.num_tokens == 16
    hbm = receiver.stats().tiers[Tier.HBM]
    assert hbm.historical + hbm.guests == 4  # where both stand on one arena they lie in the sender's pages
    assert receiver.stats().tiers[Tier.HBM].active == 0


def test_a_growing_prompt_is_read_before_it_is_whole(pair: tuple[MemPool, MemPool], fill: Any, read: Any) -> None:
    sender, receiver = pair
    blocks = sender.alloc(5)
    fill(sender, blocks, 1)
    with pytest.raises(NotSealed):
        sender.transfer_with_insert(receiver.instance, blocks, TOKENS, tag=b"g")
    sent = sender.transfer_with_insert(receiver.instance, blocks, TOKENS, tag=b"g", growing=True)
    layers = sender.layout.num_layers
    with receiver.follow(b"g", timeout=60) as following:
        for layer in range(layers):
            sender.seal(blocks, range(layer, layer + 1))
            sent.ready(layer + 1)
            following.wait(layer + 1, timeout=60)
            ours, theirs = sender.view()[sender.slots(blocks), layer], receiver.view()[receiver.slots(following.blocks)]
            assert (ours == theirs[:, layer]).all()
        assert following.num_tokens == len(TOKENS)
        with receiver.receive(b"g", timeout=60) as got:
            assert got.blocks == following.blocks
    assert sent.result(60).early_nbytes == sent.result(60).nbytes * (layers - 1) // layers
    with receiver.match(TOKENS) as hit:
        assert read(receiver, hit.blocks) == [1, 2, 3, 4]
    sender.free(blocks)
    assert receiver.stats().tiers[Tier.HBM].active == 0


def test_only_what_is_lacking_moves(pair: tuple[MemPool, MemPool], fill: Any, read: Any) -> None:
    sender, receiver = pair
    blocks = written(sender, 5, fill)
    sender.transfer_with_insert(receiver.instance, blocks[:2], TOKENS[:8]).result(10)
    sender.transfer_with_insert(receiver.instance, blocks, TOKENS, tag=b"two").result(10)
    with receiver.receive(b"two", timeout=10) as got:
        assert got.pulled_blocks == 3
        assert read(receiver, got.blocks) == [1, 2, 3, 4, 5]


def test_namespaces_travel_as_identities(pair: tuple[MemPool, MemPool], fill: Any) -> None:
    sender, receiver = pair
    receiver.namespace(Identity(model="unrelated"))  # so that the small ints differ
    identity = Identity(model="m", salt=b"tenant")
    ns = sender.namespace(identity)
    sender.transfer_with_insert(receiver.instance, written(sender, 4, fill), TOKENS[:16], ns).result(10)
    assert receiver.match(TOKENS).num_tokens == 0
    with receiver.match(TOKENS, receiver.namespace(identity)) as hit:
        assert hit.num_tokens == 16
    with pytest.raises(ConfigError, match="namespace"):
        sender.transfer_with_insert(receiver.instance, Blocks.empty(), [], 77)


def test_swapped_out_blocks_can_be_sent(pair: tuple[MemPool, MemPool], fill: Any, read: Any) -> None:
    sender, receiver = pair
    blocks = written(sender, 4, fill)
    sender.insert(TOKENS[:16], blocks)
    sender.free(blocks)
    assert sender.swap_out(2) == 2
    with sender.match(TOKENS) as hit:
        sender.transfer(receiver.instance, hit.blocks, tag=b"mixed", on_demand=Tier.DRAM).result(10)
        with receiver.receive(b"mixed", timeout=10) as got:
            assert receiver.tiers(got.blocks).tolist() == [2] * 4
            assert read(receiver, got.blocks) == [1, 2, 3, 4]


def test_reserved_blocks_are_used(pair: tuple[MemPool, MemPool], fill: Any, read: Any) -> None:
    sender, receiver = pair
    dst = sender.reserve(receiver.instance, 3)
    assert receiver.stats().tiers[Tier.HBM].active == 3
    blocks = written(sender, 2, fill)
    sender.transfer(receiver.instance, blocks, tag=b"dst", num_tokens=6, dst=dst).result(10)
    with receiver.receive(b"dst", timeout=10) as got:
        assert read(receiver, got.blocks) == [1, 2]
        assert got.num_tokens == 6
        assert receiver.stats().tiers[Tier.HBM].active == 2


def test_a_private_copy_goes_no_further(pair: tuple[MemPool, MemPool], fill: Any) -> None:
    sender, receiver = pair
    sender.transfer(receiver.instance, written(sender, 2, fill), tag=b"mine", private=True).result(10)
    with receiver.receive(b"mine", timeout=10) as got, pytest.raises(PrivateBlock):
        receiver.transfer(sender.instance, got.blocks, tag=b"on")


def test_a_full_receiver_says_so_and_keeps_nothing(pair: tuple[MemPool, MemPool], fill: Any) -> None:
    sender, receiver = pair
    receiver.alloc(14)
    sent = sender.transfer(receiver.instance, written(sender, 3, fill), tag=b"much", private=True)
    with pytest.raises((OutOfBlocks, TransferFailed)):
        sent.result(10)
    with pytest.raises((OutOfBlocks, TransferFailed)):
        receiver.receive(b"much", timeout=10)
    assert receiver.stats().tiers[Tier.HBM].free == 2


def test_wrong_shipments_are_refused_here(pair: tuple[MemPool, MemPool], fill: Any) -> None:
    sender, receiver = pair
    fresh = sender.alloc(2)
    with pytest.raises(NotSealed):
        sender.transfer(receiver.instance, fresh, tag=b"fresh")
    sender.seal(fresh)
    with pytest.raises(ConfigError, match="5 blocks"):
        sender.transfer_with_insert(receiver.instance, fresh, TOKENS)
    with pytest.raises(ConfigError, match="num_tokens"):
        sender.transfer(receiver.instance, fresh, tag=b"few", num_tokens=3)


def test_taken_blocks_outlive_the_reception(pair: tuple[MemPool, MemPool], fill: Any, read: Any) -> None:
    sender, receiver = pair
    sender.transfer(receiver.instance, written(sender, 2, fill), tag=b"take").result(10)
    with receiver.receive(b"take", timeout=10) as got:
        blocks = got.take()
    assert read(receiver, blocks) == [1, 2]
    receiver.free(blocks)


def test_after_close_nothing_is_linked(make_pool: MakePool) -> None:
    pool = make_pool(4)
    assert pool.stats().transfer is None
    pool.close()
    with pytest.raises(InstanceClosed):
        _ = pool.address


_LEFT_OPEN = """
from poolweave import KVLayout, MemPool
from poolweave.mempool import PoolConfig, Watermarks

layout = KVLayout(num_layers=2, kv_heads=2, head_dim=16, block_tokens=16, dtype="float32")
sizes = {"hbm": "4MiB", "dram": "4MiB", "config": PoolConfig(watermarks=Watermarks(high=0.9))}
sender, receiver = (MemPool(layout, instance=name, **sizes) for name in ("{0}-a", "{0}-b"))
sender.connect("{0}-b", receiver.address)
blocks = sender.alloc(2)
sender.seal(blocks)
sender.transfer_with_insert("{0}-b", blocks, list(range(32)))
raise KeyError("the caller's own")
"""


def test_a_process_that_fails_with_pools_open_ends_with_its_own_error() -> None:
    for _ in range(3):  # threads of ours may be anywhere in native code by then
        code = _LEFT_OPEN.replace("{0}", f"left-{os.getpid()}")
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 1, ended.stderr
        assert ended.stderr.endswith("""KeyError: "the caller's own"\n"""), ended.stderr
