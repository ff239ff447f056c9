"""How near to what the machine allows do the decode executors run? (CrossPool's executors)

    python benchmarks/bench_crosspool_executors.py [--hidden 512 1024] [--dtype float32 bfloat16] [--kernels avx2]

Batch 1, one thread. `to_streaming`: the time of a plain streaming read of what a token needs (weights and KV, once)
over the executor's own, in turn, in two states of the caches. `memory`: other data fills them before, as for a cold
model; `cache`: each ran just before, three times, so that what fits the last-level cache lies there. The streaming read
runs over as many bytes as the weights have, in one piece on huge pages, and over the KV where it lies. `to_bound`: the
same for what the machine allows phase by phase, weights as fast as they stream, KV as fast as it streams or as the
products over it can be done in registers, whichever takes longer; two at a time over bfloat16 where the kernels do so.
What a call costs without work is taken off all of them. One JSON line each.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from poolweave.crosspool_engine import ModelShape
from poolweave.crosspool_engine._native import KvView, kernel_names, multiply_adds, streaming_read
from poolweave.crosspool_engine.kv_layout import kv_layout
from poolweave.crosspool_engine.models import Checkpoint, build_attention_stack, build_ffn_stack
from poolweave.crosspool_engine.models.random_models import save_random_models

CONTEXT = 512


@dataclasses.dataclass(frozen=True)
class Work:
    """One part: `run(rows)`, and what a token needs at least: bytes of weights, KV where it lies, products over KV."""

    run: Callable[[int], None]
    weights: int
    kv: np.ndarray[Any, Any]
    products: int = 0


def seconds(task: Callable[[Any], object], full: Any, empty: Any) -> float:
    """Of `task(full)`, less those of `task(empty)`, which runs before it too: what a call itself reads is near."""
    task(empty)
    start = time.perf_counter()
    task(full)
    middle = time.perf_counter()
    task(empty)
    return 2 * middle - start - time.perf_counter()


def against_yardsticks(work: Work, kernels: str, rounds: int) -> dict[str, dict[str, float]]:
    """By state of the caches: medians of the streaming read's and of the bound's time over that of `run`, in turn."""
    other = np.ones(64 << 20, np.uint8)
    weights = np.ones(64 << 20, np.uint8)[: work.weights]  # large enough for numpy to ask for huge pages
    nothing = weights[:0]

    def read(array: np.ndarray[Any, Any]) -> int:
        return streaming_read(array, kernels)

    def stream() -> tuple[float, float]:
        return seconds(read, weights, nothing), seconds(read, work.kv, nothing)

    def near(task: Callable[[], object]) -> None:
        for _ in range(3):  # the first one still finds the other data, in the caches and on its way out of them
            task()

    before = {"memory": lambda _: read(other), "cache": near}
    ratios: dict[str, list[tuple[float, float]]] = {state: [] for state in before}
    for _ in range(rounds):
        for state, prepare in before.items():
            prepare(stream)
            weights_s, kv_s = stream()
            products_s = seconds(lambda count: multiply_adds(count, kernels), work.products, 0)
            prepare(lambda: work.run(1))
            took = seconds(work.run, 1, 0)
            ratios[state].append(((weights_s + kv_s) / took, (weights_s + max(kv_s, products_s)) / took))
    return {
        state: dict(zip(("to_streaming", "to_bound"), np.median(np.array(values), axis=0).tolist(), strict=True))
        for state, values in ratios.items()
    }


def on_lines(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of an array from the start of a cache line on, as in a pool."""
    room = np.empty(array.nbytes + 64, np.uint8)
    room = room[-room.ctypes.data % 64 :][: array.nbytes]
    room[:] = array.view(np.uint8)
    return room


def executors(path: str, dtype: str, kernels: str, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """By part, then by state of the caches."""
    shape = ModelShape.from_directory(path)
    size = {"float32": 4, "bfloat16": 2}[dtype]
    checkpoint = Checkpoint(path, dtype)
    attention, ffn = build_attention_stack(checkpoint, kernels=kernels), build_ffn_stack(checkpoint, kernels=kernels)
    layout = kv_layout(shape, dtype=dtype)
    blocks = layout.num_blocks(CONTEXT)
    random = np.random.default_rng(0)
    numbers = random.standard_normal(blocks * layout.block_bytes // size, np.float32)
    cached = on_lines(numbers if dtype == "float32" else (numbers.view(np.uint32) >> 16).astype(np.uint16))
    kv = KvView(layout.view(cached, blocks))
    x = random.standard_normal((1, shape.hidden), np.float32)
    residual, normed, out = x.copy(), np.empty_like(x), np.empty_like(x)
    table, position = np.arange(blocks, dtype=np.int32)[None], np.array([CONTEXT - 1], np.int32)

    def attend(rows: int) -> None:
        state = residual[:rows], normed[:rows]
        for layer in range(shape.num_layers):
            attention.attend(layer, kv, position[:rows], table[:rows], None, *state)

    def feed(rows: int) -> None:
        for layer in range(shape.num_layers):
            ffn.forward(layer, x[:rows], out[:rows])

    products = shape.num_layers * CONTEXT * shape.attention.kv_products
    if dtype == "bfloat16" and kernels == "avx512bf16":
        products //= 2
    active = sum(shape.active_ffn_params(layer) for layer in range(shape.num_layers)) * size
    return {
        "attention": against_yardsticks(Work(attend, shape.attention_params * size, cached, products), kernels, rounds),
        "ffn": against_yardsticks(Work(feed, active, cached[:0]), kernels, rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--kernels", default=kernel_names()[-1], help="of the yardsticks too")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--smoke", action="store_true", help="one small size, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.hidden, options.dtype, options.rounds = [128], ["float32"], 1
    for hidden, dtype in itertools.product(options.hidden, options.dtype):
        with tempfile.TemporaryDirectory() as folder:
            paths = save_random_models(Path(folder), hidden=hidden, layers=1 if options.smoke else 4, dtype=dtype)
            for name, path in paths.items():
                common = {"bench": "crosspool_executors", "hidden": hidden, "dtype": dtype, "kernels": options.kernels}
                for part, states in executors(path, dtype, options.kernels, options.rounds).items():
                    for state, ratios in states.items():
                        figures = {key: round(value, 2) for key, value in ratios.items()}
                        print(json.dumps({**common, "model": name, "part": part, "from": state, **figures}), flush=True)


if __name__ == "__main__":
    main()
