"""How fast do blocks move under TLS, against plain TCP, two bare TLS sockets, and AES-GCM alone in the same run?

Two processes on one machine, 1,024 blocks of 160 KiB at random places, both sides resident, checksums on, over one
connection and two. In turn: `aes`, what one core seals in memory, with nothing sent; `bare`, two `SSLSocket`s that send
and receive as much; `plain`, transfers over TCP; `tls`, over TLS. `python benchmarks/bench_transfer_tls.py [--smoke]`;
one JSON line a number of connections.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tls_yardsticks import certificate, contexts, sealing
from transfer_yardsticks import timed

from poolweave import KVLayout, MemPool
from poolweave.mempool import Blocks, PoolConfig
from poolweave.transfer import TlsFiles, TransferConfig

SMOKE = "--smoke" in sys.argv
BLOCKS = 64 if SMOKE else 1024
ROUNDS = 1 if SMOKE else 5
LAYOUT = KVLayout(num_layers=1, kv_heads=40, head_dim=128, block_tokens=8, dtype="float16")  # 160 KiB
NBYTES = BLOCKS * LAYOUT.block_bytes
PIECE = 1 << 20
spawn = multiprocessing.get_context("spawn")


def open_pool(name: str, tls: TlsFiles | None, connections: int) -> MemPool:
    config = TransferConfig(listen="tcp://127.0.0.1:0", tls=tls, connections=connections)
    return MemPool(LAYOUT, instance=name, hbm=NBYTES, config=PoolConfig(transfer=config))


def serve(files: TlsFiles, connections: int, pipe: Any) -> None:
    """Receives: transfers into two pools, and what comes over bare sockets."""
    listener = socket.create_server(("127.0.0.1", 0))
    pools = {name: open_pool(name, files if name == "tls" else None, connections) for name in ("plain", "tls")}
    for pool in pools.values():
        blocks = pool.alloc(BLOCKS)
        pool.view()[pool.slots(blocks)] = 0
        pool.free(blocks)
    pipe.send(({name: pool.address for name, pool in pools.items()}, listener.getsockname()))
    bare = contexts(files)[0].wrap_socket(listener.accept()[0], server_side=True)
    room = memoryview(bytearray(PIECE))
    while (order := pipe.recv()) is not None:
        if order == "bare":
            left = NBYTES
            while left:
                left -= bare.recv_into(room[: min(left, PIECE)])
        else:
            pools[order].receive(b"t", 60).close()
        pipe.send("ok")
    for pool in pools.values():
        pool.close()


class Source:
    """A pool full of sealed blocks."""

    def __init__(self, name: str, address: str, files: TlsFiles | None, connections: int) -> None:
        self._peer = name
        self.pool = open_pool(f"source-{name}", files, connections)
        self.pool.connect(name, address)
        blocks = self.pool.alloc(BLOCKS)
        self.pool.view()[self.pool.slots(blocks)] = 3
        self.pool.seal(blocks)
        self._blocks = Blocks.of(np.random.default_rng(1).permutation(blocks.array))

    def send(self) -> None:
        self.pool.transfer(self._peer, self._blocks, tag=b"t").result(60)


def measure(files: TlsFiles, connections: int) -> dict[str, float]:
    pipe, theirs = spawn.Pipe()
    child = spawn.Process(target=serve, args=(files, connections, theirs))
    child.start()
    try:
        addresses, bare_at = pipe.recv()
        bare = contexts(files)[1].wrap_socket(socket.create_connection(bare_at), server_hostname="127.0.0.1")
        data = memoryview(bytearray(NBYTES))
        sources = {
            name: Source(name, at, files if name == "tls" else None, connections) for name, at in addresses.items()
        }
        ways: dict[str, Callable[[], None]] = {
            "aes": sealing(files, NBYTES), "bare": lambda: bare.sendall(data),
            **{name: one.send for name, one in sources.items()},
        }  # fmt: skip
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS + 1):
            for name, way in ways.items():
                if name == "aes":
                    seconds[name].append(timed(way))
                    continue
                pipe.send(name)
                seconds[name].append(timed(lambda way=way: (way(), pipe.recv())))  # type: ignore[misc]
        for one in sources.values():
            one.pool.close()
        pipe.send(None)
        child.join(30)
    finally:
        child.kill()
        child.join()
    return {name: NBYTES / statistics.median(values[1:]) / 1e9 for name, values in seconds.items()}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = certificate(Path(folder))
        for connections in (1, 2):
            speeds = measure(files, connections)
            print(json.dumps({
                "bench": "transfer_tls", "connections": connections, "nbytes": NBYTES, "unit": "GB/s",
                **{name: round(value, 3) for name, value in speeds.items()},
                **{f"tls_of_{name}": round(speeds["tls"] / speeds[name], 3) for name in ("plain", "bare", "aes")},
            }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
