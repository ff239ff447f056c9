"""How fast do blocks move between two processes, against a plain memcpy in the same run?

MemServe Fig. 11: discrete against aggregated blocks. a: 128 blocks of Llama-2-13B as 10,240 small ones of 160 KiB;
b: as 128 of 12.5 MiB; c: one block of 1.56 GiB. All at random places, destination resident, mapping populated unless
"cold". `python benchmarks/bench_transfer_speed.py [--smoke] [shm|tcp ...] [a|b|c ...]`; one JSON line a point.
"""

from __future__ import annotations

import json
import mmap
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from poolweave.mempool import MemPool, PoolConfig
from poolweave.transfer import KVLayout, TransferConfig
from poolweave.types import Tier

SMOKE = "--smoke" in sys.argv
SCALE = 16 if SMOKE else 1
REPEATS = 2 if SMOKE else 5
BLOCKS = 128 // SCALE


def layout_of(mode: str) -> KVLayout:
    shape: dict[str, Any] = {"num_layers": 40, "kv_heads": 40, "head_dim": 128, "dtype": "float16"}
    if mode == "c":
        return KVLayout(**shape, block_tokens=16 * BLOCKS, order="aggregated")
    return KVLayout(**shape, block_tokens=16, order="layered" if mode == "a" else "aggregated")


def open_pool(name: str, mode: str, transport: str, checksums: bool, threads: int) -> MemPool:
    layout = layout_of(mode)
    count = 1 if mode == "c" else BLOCKS
    config = TransferConfig(listen=transport, checksums=checksums, copy_threads=threads, connections=threads)
    return MemPool(layout, instance=name, hbm=count * layout.block_bytes, config=PoolConfig(transfer=config))


def serve(mode: str, transport: str, checksums: str, threads: str) -> None:
    """The receiver: takes each transfer and drops it."""
    with open_pool(f"receiver-{mode}", mode, transport, checksums == "1", int(threads)) as pool:
        blocks = pool.alloc(1 if mode == "c" else BLOCKS)
        pool.view(Tier.HBM)[pool.slots(blocks)] = 0  # resident
        pool.free(blocks)
        print(pool.address, flush=True)
        for line in sys.stdin:
            pool.receive(line.strip().encode(), 60).close()
            print("ok", flush=True)


class Yardstick:
    """A plain one-thread copy of the same pieces at random places; timed right before each transfer."""

    def __init__(self, mode: str) -> None:
        layout = layout_of(mode)
        piece, count = (layout.plane_bytes, BLOCKS * layout.num_planes) if mode == "a" else (layout.block_bytes, BLOCKS)
        if mode == "c":
            count = 1
        # Plain pages: numpy asks for huge ones, which pools do not have.
        self._source, self._target = (
            np.frombuffer(mmap.mmap(-1, count * piece), np.uint8).reshape(count, piece) for _ in range(2)
        )
        self._source[...], self._target[...] = 1, 2
        rng = np.random.default_rng(0)
        self._order = list(zip(rng.permutation(count).tolist(), rng.permutation(count).tolist(), strict=True))

    def seconds(self) -> float:
        start = time.perf_counter()
        for i, j in self._order:
            np.copyto(self._target[i], self._source[j])
        return time.perf_counter() - start


def measure(mode: str, transport: str, checksums: bool, threads: int) -> None:
    arguments = [mode, transport, str(int(checksums)), str(threads)]
    flags = ["--smoke"] if SMOKE else []
    command = [sys.executable, __file__, "--serve", *arguments, *flags]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    with open_pool(f"sender-{mode}", mode, transport, checksums, threads) as pool:
        pool.connect(f"receiver-{mode}", child.stdout.readline().strip())
        blocks = pool.alloc(1 if mode == "c" else BLOCKS)
        pool.view(Tier.HBM)[pool.slots(blocks)] = 3
        pool.seal(blocks)
        handles = np.random.default_rng(1).permutation(blocks.array)
        nbytes = len(handles) * pool.layout.block_bytes
        yardstick = Yardstick(mode)
        seconds, plain = [], []
        for i in range(REPEATS + 1):
            plain.append(yardstick.seconds())
            child.stdin.write(f"{i}\n")
            child.stdin.flush()
            start = time.perf_counter()
            report = pool.transfer(f"receiver-{mode}", handles, tag=b"%d" % i).result(120)
            seconds.append(time.perf_counter() - start)
            child.stdout.readline()
        child.stdin.close()
        child.wait(30)
    ratios = sorted(p / t for p, t in zip(plain[1:], seconds[1:], strict=True))
    point = {
        "bench": "transfer_speed", "mode": mode, "transport": transport, "checksums": checksums, "threads": threads,
        "gb_per_s": round(nbytes / statistics.median(seconds[1:]) / 1e9, 3),
        "cold_gb_per_s": round(nbytes / seconds[0] / 1e9, 3), "calls": report.calls,
        "memcpy_gb_per_s": round(nbytes / statistics.median(plain[1:]) / 1e9, 3),
        "of_memcpy": round(statistics.median(ratios), 3), "worst": round(ratios[0], 3), "best": round(ratios[-1], 3),
    }  # fmt: skip
    print(json.dumps(point), flush=True)


def main() -> None:
    asked = [one for one in sys.argv[1:] if one in ("shm", "tcp")] or ["shm", "tcp"]
    modes = [one for one in sys.argv[1:] if one in ("a", "b", "c")] or ["a", "b", "c"]
    for transport in asked:
        for mode in modes:
            for checksums, threads in ((False, 1), (False, 2), (True, 1)):
                measure(mode, transport, checksums, threads)


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve(*sys.argv[2:6])
    else:
        main()
