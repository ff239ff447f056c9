"""Real MemPools in two processes: the calls a serving engine makes, over shared memory and TCP."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from poolweave.errors import OutOfBlocks
from poolweave.mempool import MemPool, PoolConfig
from poolweave.transfer import KVLayout, TransferConfig
from poolweave.types import Tier

pytestmark = pytest.mark.multiproc
SLOTS = 24


def layout(order: str) -> KVLayout:
    return KVLayout(num_layers=3, kv_heads=2, head_dim=16, order=order)  # type: ignore[arg-type]


def open_pool(name: str, order: str, listen: str) -> MemPool:
    nbytes = SLOTS * layout(order).block_bytes
    config = PoolConfig(transfer=TransferConfig(listen=listen))
    return MemPool(layout(order), instance=name, hbm=nbytes, dram=nbytes, config=config)


def serve(name: str, order: str, listen: str) -> None:
    """The receiver: `{"tag"}` -> what arrived; `{"tokens"}` -> how many of them are indexed."""
    with open_pool(name, order, listen) as pool:
        print(pool.address, flush=True)  # noqa: T201
        for line in sys.stdin:
            order_ = json.loads(line)
            answer: dict[str, Any] = {}
            if "tag" in order_:
                with pool.receive(order_["tag"].encode(), 20) as got:
                    kv = pool.view(Tier.HBM)[pool.slots(got.blocks)]
                    answer = {"tokens": got.num_tokens, "pulled": got.pulled_blocks, "sum": checksum(kv)}
            elif "tokens" in order_:
                with pool.match(np.arange(order_["tokens"], dtype=np.int32)) as hit:
                    answer = {"hit": hit.num_tokens, "sum": checksum(pool.view(Tier.HBM)[pool.slots(hit.blocks)])}
            pool.check()
            print(json.dumps(answer), flush=True)  # noqa: T201


def checksum(kv: np.ndarray[Any, Any]) -> float:
    """Of the KV in the order of its axes, whatever its strides: places count, not only values."""
    flat = np.ascontiguousarray(kv).ravel().astype(np.float64)
    return float(flat @ (np.arange(flat.size) % 97 + 1))


class Receiver:
    def __init__(self, name: str, order: str, listen: str) -> None:
        command = [sys.executable, __file__, name, order, listen]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.name = name
        self.address = self._process.stdout.readline().strip()

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0
        self._process.stdout.close()


@pytest.fixture(
    scope="module",
    params=[("shm", "aggregated", "layered"), ("shm", "token_major", "aggregated"), ("tcp", "layered", "aggregated")],
)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[MemPool, Receiver]]:
    listen, here, there = request.param
    with open_pool(f"sender-{here}-{listen}", here, listen) as pool:
        receiver = Receiver(f"receiver-{here}-{listen}", there, listen)
        pool.connect(receiver.name, receiver.address)
        yield pool, receiver
        receiver.close()
        pool.check()


def fill(pool: MemPool, n: int, seed: int) -> Any:
    blocks = pool.alloc(n)
    kv = pool.view(Tier.HBM)
    rng = np.random.default_rng(seed)
    kv[pool.slots(blocks)] = rng.integers(0, 100, (n, *kv.shape[1:])).astype(kv.dtype)
    pool.seal(blocks)
    return blocks


def test_blocks_arrive_are_indexed_and_are_not_sent_twice(pair: tuple[MemPool, Receiver]) -> None:
    pool, receiver = pair
    blocks = fill(pool, 4, 1)
    wanted = checksum(pool.view(Tier.HBM)[pool.slots(blocks)])
    tokens = np.arange(70, dtype=np.int32)  # four whole blocks and a part of the fifth
    last = fill(pool, 1, 2)
    first = pool.transfer_with_insert(receiver.name, blocks, tokens[:64]).result(20)
    assert (first.num_blocks, first.pulled_blocks) == (4, 4)
    assert receiver.ask(tokens=64) == {"hit": 64, "sum": wanted}
    both = blocks + last
    second = pool.transfer_with_insert(receiver.name, both, tokens, tag=b"all").result(20)
    assert (second.num_blocks, second.pulled_blocks) == (5, 1)
    got = receiver.ask(tag="all")
    assert (got["tokens"], got["pulled"]) == (70, 1)
    assert got["sum"] == checksum(pool.view(Tier.HBM)[pool.slots(both)])
    pool.free(both)


def test_swapped_out_blocks_are_sent_from_where_they_lie(pair: tuple[MemPool, Receiver]) -> None:
    pool, receiver = pair
    blocks = fill(pool, 3, 3)
    wanted = checksum(pool.view(Tier.HBM)[pool.slots(blocks)])
    pool.insert(np.arange(1000, 1048, dtype=np.int32), blocks)
    pool.free(blocks)
    assert pool.swap_out(2) == 2
    with pool.match(np.arange(1000, 1048, dtype=np.int32)) as hit:
        pool.transfer(receiver.name, hit.blocks, tag=b"swapped").result(20)
    assert receiver.ask(tag="swapped")["sum"] == wanted


def test_a_receiver_without_room_says_so_and_keeps_working(pair: tuple[MemPool, Receiver]) -> None:
    """The last one of a pair: its reservation stays."""
    pool, receiver = pair
    pool.reserve(receiver.name, SLOTS - 2)
    blocks = fill(pool, 3, 4)
    with pytest.raises(OutOfBlocks) as caught:
        pool.transfer(receiver.name, blocks, tag=b"full").result(20)
    assert (caught.value.needed, caught.value.free + caught.value.evictable) == (3, 2)
    pool.transfer(receiver.name, blocks[:2], tag=b"fits").result(20)
    assert receiver.ask(tag="fits")["tokens"] == 32
    pool.free(blocks)


if __name__ == "__main__":
    serve(*sys.argv[1:4])
