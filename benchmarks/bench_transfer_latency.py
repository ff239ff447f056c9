"""What does one small transfer cost, against a bare ZeroMQ ping-pong between the same two processes?

A complete transfer_with_insert of one 16-token block over shared memory, offer to confirm: matched, allocated, pulled,
checked, indexed. Ping-pongs and transfers take turns, and the ratio of their medians is what counts: with both on one
core, as the scheduler has them on a busy machine, and with each on its own.
`python benchmarks/bench_transfer_latency.py [--smoke]`; one JSON line a round.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import zmq

from poolweave.mempool import MemPool
from poolweave.transfer import KVLayout
from poolweave.types import Tier

LAYOUT = KVLayout(num_layers=4, kv_heads=3, head_dim=64)  # 48 KiB a block
ROUND = 50 if "--smoke" in sys.argv else 500
ROUNDS = 1 if "--smoke" in sys.argv else 4
BLOCKS = ROUND * (ROUNDS + 1)


def open_pool(name: str) -> MemPool:
    return MemPool(LAYOUT, instance=f"{name}-{os.environ['BENCH_ID']}", hbm=BLOCKS * LAYOUT.block_bytes)


def touch(pool: MemPool) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """All blocks of the pool, written once, so that no page is met for the first time later."""
    blocks = pool.alloc(BLOCKS)
    pool.view(Tier.HBM)[pool.slots(blocks)] = 1
    return np.asarray(blocks.array)


def serve(endpoint: str, core: int) -> None:
    os.sched_setaffinity(0, {core})
    socket = zmq.Context().socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    with open_pool("receiver") as pool:
        pool.free(touch(pool))
        socket.send_string(pool.address)
        while (message := socket.recv()) != b"end":
            socket.send(message)
    socket.close()


def timed(action: Callable[[int], object], count: int, first: int = 0) -> list[float]:
    seconds = []
    for i in range(first, first + count):
        start = time.perf_counter()
        action(i)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)


def measure(ours: int, theirs: int) -> None:
    os.sched_setaffinity(0, {ours})
    socket = zmq.Context().socket(zmq.PAIR)
    endpoint = f"ipc://@poolweave-bench-{os.getpid()}"
    socket.bind(endpoint)
    child = subprocess.Popen([sys.executable, __file__, "--serve", endpoint, str(theirs), *sys.argv[1:]])
    address = socket.recv_string()
    peer = f"receiver-{os.getpid()}"
    tokens = np.random.default_rng(0).integers(0, 2**31 - 1, (BLOCKS, 16)).astype(np.int32)
    with open_pool("sender") as pool:
        pool.connect(peer, address)
        blocks = touch(pool)
        pool.seal(blocks)
        for first in range(0, BLOCKS, ROUND):  # checksums are made, mappings populated
            pool.transfer(peer, blocks[first : first + ROUND], tag=b"").result(60)

        def ping(_: int) -> None:
            socket.send(b"x" * 32)
            socket.recv()

        def transfer(i: int) -> None:
            pool.transfer_with_insert(peer, blocks[i : i + 1], tokens[i]).result(10)

        timed(ping, ROUND)
        timed(transfer, ROUND)
        for one in range(ROUNDS):
            pings, transfers = timed(ping, ROUND), timed(transfer, ROUND, ROUND * (one + 1))
            point = {
                "bench": "transfer_latency", "unit": "us", "cores": len({ours, theirs}),
                "block_bytes": LAYOUT.block_bytes,
                "zmq_p50": round(pings[ROUND // 2] * 1e6, 1), "p50": round(transfers[ROUND // 2] * 1e6, 1),
                "p99": round(transfers[ROUND * 99 // 100] * 1e6, 1), "min": round(transfers[0] * 1e6, 1),
                "of_zmq": round(transfers[ROUND // 2] / pings[ROUND // 2], 2),
                "min_of_zmq_min": round(transfers[0] / pings[0], 2),
            }  # fmt: skip
            print(json.dumps(point), flush=True)
        socket.send(b"end")
        child.wait(30)
    socket.close()


def main() -> None:
    os.environ["BENCH_ID"] = str(os.getpid())
    first, *others = sorted(os.sched_getaffinity(0))
    for core in (first, *others[:1]):
        measure(first, core)


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        main()
