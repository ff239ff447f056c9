"""Does the vLLM connector load KV at memcpy's speed?

Scattered pages of a Llama-3-8B-like cache (32 layers, 128 KiB a page) and of SmolLM2 (30 layers, 48 KiB), loaded out of
a pool's memory by the worker's side, against one memcpy of as many bytes, in turn; one thread each. Both read a pool's
memory and write memory of one kind; the large cases exceed every cache, so both read DRAM, and the small ones (short
prefixes) fit into the last one, so both read that.
`python benchmarks/bench_vllm_load.py [--smoke]`; one JSON line a case, `ratio` is memcpy's time over ours.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from poolweave import KVLayout, MemPool
from poolweave.integrations.vllm.step_plan import Copies, StepPlan
from poolweave.integrations.vllm.worker_side import CacheLayer, WorkerSide
from poolweave.mempool import PoolConfig
from poolweave.transfer.layout import Part

SMOKE = "--smoke" in sys.argv
REPEATS = 3 if SMOKE else 21  # of a large case; of a short one as many as move the same bytes
CASES = {
    "llama-3-8b": (32, 8, 256, "float16", 64),
    "smollm2": (30, 3, 128, "float32", 128),
    "smollm2-short": (30, 3, 128, "float32", 4),
    "smollm2-one-block": (30, 3, 128, "float32", 1),
}


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(name: str, layers: int, heads: int, width: int, dtype: str, blocks: int) -> dict[str, object]:
    layout = KVLayout(num_layers=layers, kv_heads=heads, head_dim=width, block_tokens=32, dtype=dtype,
                      parts=(Part("page-bench", heads, width, "replicate"),))  # fmt: skip
    rng = np.random.default_rng(0)
    with MemPool(layout, hbm=2 * blocks * layout.block_bytes,
                 config=PoolConfig(max_hbm=2 * blocks * layout.block_bytes)) as pool:  # fmt: skip
        held = pool.alloc(2 * blocks)
        pool.view()[pool.slots(held)] = 1
        caches = [np.ones((2 * blocks, layout.plane_bytes), np.uint8) for _ in range(layers)]
        worker = WorkerSide({f"layer.{i}": CacheLayer(cache.ctypes.data, 2 * blocks, layout.plane_bytes)
                             for i, cache in enumerate(caches)}, 1)  # fmt: skip
        pages = rng.permutation(2 * blocks)[:blocks].astype(np.int32)
        rows = rng.permutation(2 * blocks)[:blocks].astype(np.int32)
        worker.begin(StepPlan(pool.window(), 1, Copies(pages, rows)))
        source, target = pool.window().open()[: blocks * layout.block_bytes], np.concatenate(caches, axis=None)
        target = target[: len(source)]
        ours, memcpy = [], []
        for _ in range(REPEATS if SMOKE else max(REPEATS, REPEATS * (180 << 20) // (blocks * layout.block_bytes))):
            ours.append(seconds(worker.load))
            memcpy.append(seconds(lambda: np.copyto(target, source)))
        assert not worker.failed_pages()
    nbytes, loaded, copied = blocks * layout.block_bytes, statistics.median(ours), statistics.median(memcpy)
    ratio = statistics.median(m / o for m, o in zip(memcpy, ours, strict=True))
    rates = {"load_gb_per_s": round(nbytes / loaded / 1e9, 2), "memcpy_gb_per_s": round(nbytes / copied / 1e9, 2)}
    return {"case": name, "mib": nbytes >> 20, **rates, "ratio": round(ratio, 2)}


if __name__ == "__main__":
    for name, case in CASES.items():
        print(json.dumps(measure(name, *case)))
