"""What do the pool's memory calls cost? Against vLLM's BlockPool, memcpy and bare mmap, in one run.

The paper's figure is 800 ns a block (MemServe §6). Goals: alloc + free through Python at most 1/8 of BlockPool's time
a block in batches of 128 and 1/2 one by one; a swap at least 0.9 of memcpy with aggregated blocks, 0.7 with 160 KiB
planes; mapping a kept page at most twice the bare mmap; the same cost a block from 1k to 10M blocks. Calls of ours and
theirs alternate; ratios are of the medians. `--vllm` names a folder with vLLM's wheel unpacked (needs torch).

    python benchmarks/bench_pool.py --vllm ~/.cache/poolweave-peers/vllm_src
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import mmap
import statistics
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from poolweave.mempool import Arena, MemPool
from poolweave.mempool._native import BlockTable, TierGeometry, swap_blocks
from poolweave.transfer import KVLayout

TINY = KVLayout(num_layers=1, kv_heads=1, head_dim=1, block_tokens=16, dtype="float32")
REAL = {"vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_utils", "vllm.utils.math_utils"}


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """vLLM's block pool from its own source; all other modules of vLLM are mocks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "vllm":
            return None
        if name in REAL:
            return importlib.util.spec_from_file_location(name, self.folder / (name.replace(".", "/") + ".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module, mocks = types.ModuleType(spec.name), {}
        module.__path__ = []

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return mocks.setdefault(name, MagicMock(name=name))

        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return


def report(what: str, **figures: float) -> None:
    print(json.dumps({"bench": what, **{name: round(value, 3) for name, value in figures.items()}}), flush=True)


def seconds(call: Callable[[], object], rounds: int) -> float:
    start = time.perf_counter()
    for _ in range(rounds):
        call()
    return (time.perf_counter() - start) / rounds


def alternate(
    ours: Callable[[], object], theirs: Callable[[], object], rounds: int, calls: int = 1
) -> tuple[float, float]:  # fmt: skip
    """Medians of both, in seconds a call; `calls` at a time, so that the clock's own cost does not count."""
    pairs = [(seconds(ours, calls), seconds(theirs, calls)) for _ in range(rounds)]
    return statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)


def bench_alloc(vllm: Path | None, smoke: bool) -> None:
    pool = MemPool(TINY, hbm=65536 * TINY.block_bytes)
    theirs: Any = None
    if vllm is not None:
        sys.meta_path.insert(0, Stubs(vllm))
        theirs = importlib.import_module("vllm.v1.core.block_pool").BlockPool(65536, False, 16)
    for n in (1, 128, 2048):
        rounds = 3 if smoke else {1: 300, 128: 100, 2048: 60}[n]

        def ours(n: int = n) -> None:
            pool.free(pool.alloc(n))

        def peer(n: int = n) -> None:
            if theirs is not None:
                theirs.free_blocks(reversed(theirs.get_new_blocks(n)))

        a, b = alternate(ours, peer, rounds, max(1, 256 // n))
        extra = {"vllm_ns": b / n * 1e9, "vllm_over_ours": b / a} if theirs is not None else {}
        report(f"alloc+free of {n}", ns_per_block=a / n * 1e9, **extra)
    pool.close()


def bench_scale(smoke: bool) -> None:
    for size in (1_000, 10_000_000 if not smoke else 100_000):
        table, out = BlockTable(size, 0), np.empty(size, np.uint64)
        start = time.perf_counter()
        assert table.alloc(out, 1)
        table.free(out)
        report(f"a table of {size}", ns_per_block=(time.perf_counter() - start) / size * 1e9)
        small = out[:500].copy()
        run = lambda t=table, s=small: (t.alloc(s, 1), t.free(s))  # noqa: E731
        cost = statistics.median(seconds(run, 20) for _ in range(20))
        report(f"500 blocks of {size}", ns_per_block=cost / 500 * 1e9)


def bench_swap(smoke: bool) -> None:
    planes, plane = (80, 160 << 10) if not smoke else (8, 16 << 10)
    blocks = 32
    nbytes = blocks * planes * plane
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    order = np.random.default_rng(1).permutation(blocks).astype(np.int32)
    slots = np.arange(blocks, dtype=np.int32)

    def memcpy(first: int, count: int) -> None:
        ctypes.memmove(target.ctypes.data + first, source.ctypes.data + first, count)

    def memcpy_two() -> None:
        other = threading.Thread(target=memcpy, args=(nbytes // 2, nbytes // 2))
        other.start()
        memcpy(0, nbytes // 2)
        other.join()

    for name, strides in (("aggregated", (planes * plane, plane)), ("160 KiB planes", (plane, blocks * plane))):
        a, b = TierGeometry(source.ctypes.data, *strides), TierGeometry(target.ctypes.data, *strides)
        for threads, copy in ((1, lambda: memcpy(0, nbytes)), (2, memcpy_two)):
            run = lambda a=a, b=b, t=threads: swap_blocks(a, b, slots, order, planes, plane, t)  # noqa: E731
            ours, theirs = alternate(run, copy, 3 if smoke else 15)
            report(f"swap {name}, {threads} threads", gb_per_s=nbytes / ours / 1e9, of_memcpy=theirs / ours)


def bench_map(smoke: bool) -> None:
    page, count = 2 << 20, 8 if smoke else 128
    arena = Arena(count * page)
    span = arena.reserve(count * page)
    span.map(0, count)
    span.buffer()[:] = 1
    span.unmap(0, count)  # kept from here on
    libc, reserved = ctypes.CDLL(None, use_errno=True), mmap.mmap(-1, count * page, mmap.MAP_PRIVATE | 0x4000)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    base, fd = ctypes.addressof(ctypes.c_char.from_buffer(reserved)), arena.descriptors[0]
    fixed, private = 0x10 | mmap.MAP_SHARED, 0x10 | 0x4000 | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

    def ours() -> None:
        for index in range(count):
            span.map(index, 1)
        span.unmap(0, count)

    def bare() -> None:
        for index in range(count):
            libc.mmap(base + index * page, page, 3, fixed, fd, index * page)
        libc.mmap(base, count * page, 1, private, -1, 0)

    a, b = alternate(ours, bare, 3 if smoke else 30)
    report("map of a kept page", us=a / count * 1e6, bare_mmap_us=b / count * 1e6, of_bare=a / b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=lambda text: Path(text).expanduser(), default=None)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    bench_alloc(given.vllm, given.smoke)
    bench_map(given.smoke)
    bench_swap(given.smoke)
    bench_scale(given.smoke)


if __name__ == "__main__":
    main()
