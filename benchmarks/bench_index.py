"""How fast and how large is the prefix index, against SGLang's Rust radix tree on the same prompts? (MemServe Fig. 10)

The prompts of workload.py. Each library runs in processes of its own, ours and theirs in turn; times are CPU time of
one thread, medians over rounds. `--peers DIR` names a folder with idx/bin/python (torch), sglang_src/ (the wheel of
SGLang 0.5.23, unpacked) and lb, a program that prints the least that hashing and comparing can take.

    python benchmarks/bench_index.py --peers ~/.cache/poolweave-peers          (--smoke: 2 s, no peers)
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import re
import statistics
import subprocess
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from workload import BLOCK, TOKENS, prompts, pythons_of, report, rounds_in_turn


class Ours:
    def __init__(self) -> None:
        from poolweave.index import RadixIndex, block_keys

        self.keys = block_keys
        self.make = lambda: RadixIndex(BLOCK)
        self.values = [np.arange(i * 256, (i + 1) * 256, dtype=np.uint64) for i in range(8)]

    def key(self, prompt: Any) -> Any:
        return prompt

    def insert(self, tree: Any, key: Any, i: int) -> None:
        tree.insert(key, self.values[i % 8])

    def match(self, tree: Any, key: Any) -> int:
        return int(tree.match(key).num_tokens)

    def evict_half(self, tree: Any) -> int:
        return len(tree.evict(len(tree) // 2))


class Sglang:
    def __init__(self, folder: Path) -> None:
        import torch

        [library] = folder.glob("sglang_src/sglang/srt/mem_cache/rust_tree_core/mem_cache*.so")
        spec = importlib.util.spec_from_file_location("mem_cache", library)
        assert spec is not None
        assert spec.loader is not None
        self.rust = rust = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(rust)
        torch.set_num_threads(1)
        settings = dict(eviction_policy="lru", page_size=BLOCK, device="cpu", enable_kv_cache_events=False)
        self.make = lambda: rust.RustUnifiedTreeCoreBinding(rust.TreeCoreInitParamsBinding(**settings), [0])
        self.values = [torch.arange(i * TOKENS, (i + 1) * TOKENS, dtype=torch.int64) for i in range(8)]

    def key(self, prompt: Any) -> Any:
        return array("q", prompt.tolist())

    def insert(self, tree: Any, key: Any, i: int) -> None:
        tree.insert(self.rust.InsertParamsBinding(key=key, value=self.values[i % 8]))

    def match(self, tree: Any, key: Any) -> int:
        return int(tree.match_prefix(self.rust.MatchParamsBinding(key=key)).device_prefix_len)

    def evict_half(self, tree: Any) -> int:
        wanted, tracker = tree.evictable_size() // 2, {0: 0}
        tree.evict_device_start(0, wanted)
        while tracker[0] < wanted:
            step = tree.evict_device_next_node(0, tracker)
            tracker[0] += step.tracker.get(0, 0)
            if step.node_id is not None:
                tracker[0] += tree.evict_device_leaf(step.node_id).tracker.get(0, 0)
            elif not step.made_progress:
                break
        tree.evict_device_end(0)
        return tracker[0] // BLOCK


def rss() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def cpu_us(call: Callable[[], object], count: int) -> float:
    call()
    start = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - start) / count * 1e6


def threads_per_s(call: Callable[[int], object], count: int, seconds: float) -> float:
    """Calls a second of `count` threads together, by the clock on the wall."""
    done, cores = [0] * count, sorted(os.sched_getaffinity(0))
    end = time.perf_counter() + seconds

    def work(me: int) -> None:
        os.sched_setaffinity(threading.get_native_id(), {cores[me % len(cores)]})
        while time.perf_counter() < end:
            call(me * 7919 + done[me])
            done[me] += 1

    workers = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / seconds


def measure(library: Any, conversations: int, repeats: int) -> dict[str, float]:
    made = list(prompts(conversations))
    keys = [library.key(prompt) for prompt in made]
    results: dict[str, float] = {}
    tree, before, start = library.make(), rss(), time.process_time()
    for i, key in enumerate(keys):
        library.insert(tree, key, i)
    results["insert_per_s"] = len(keys) / (time.process_time() - start)
    blocks = 8 * 64 + conversations * 128 + len(keys) * 64
    results["bytes_per_block"] = (rss() - before) / blocks  # first of all: nothing freed before is used again
    start = time.process_time()
    assert all(library.match(tree, key) == TOKENS for key in keys)
    results["match_per_s"] = len(keys) / (time.process_time() - start)
    if isinstance(library, Ours):
        batches = [made[i : i + 64] for i in range(0, len(made), 64)]
        results["match_many_threads_2_over_1"] = statistics.median(
            two / one
            for one, two in (
                [threads_per_s(lambda i: tree.match_many(batches[i % len(batches)]), n, 0.3) for n in (1, 2)]
                for _ in range(5)
            )
        )
        results["keys_us"] = cpu_us(lambda: library.keys(made[0]), repeats * 4)
    start = time.process_time()
    results["evict_blocks_per_s"] = library.evict_half(tree) / (time.process_time() - start)
    trees = [library.make() for _ in range(repeats)]
    start = time.process_time()
    for tree in trees:
        library.insert(tree, keys[0], 0)
    results["insert_empty_us"] = (time.process_time() - start) / repeats * 1e6
    other = made[0].copy()
    for name, cached in (("quarter", TOKENS // 4), ("half", TOKENS // 2), ("full", TOKENS)):
        other[:cached], other[cached:] = made[0][:cached], 127_999
        key = library.key(other)
        assert library.match(trees[0], key) == cached
        results[f"match_{name}_us"] = cpu_us(lambda key=key: library.match(trees[0], key), repeats * 4)  # type: ignore[misc]
    return results


def limits(ours: list[dict[str, float]], program: Path) -> None:
    """What hashing the tokens once, and comparing them once, would take in the same state of the caches."""
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    least = {name.strip(): float(us) for name, us in re.findall(r"(.+): ([0-9.]+) us", printed)}
    pairs = {
        "keys_us": "xxh3_128 chained 256x80B",
        "match_full_us": "memcmp 16KiB (hot L1)",
        "match_per_s": "memcmp 16KiB (cold DRAM)",
    }
    for metric, limit in pairs.items():
        value = statistics.median(one[metric] for one in ours)
        us = 1e6 / value if metric.endswith("per_s") else value
        point = {"metric": metric, "us": round(us, 3), "limit": limit, "limit_us": least[limit]}
        print(json.dumps({**point, "ratio": round(us / least[limit], 3)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--run", choices=["ours", "sglang"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    size, repeats = (5, 20) if given.smoke else (given.conversations, 300)
    if given.run:
        library = Ours() if given.run == "ours" else Sglang(given.peers)
        print(json.dumps(measure(library, size, repeats)))
        return
    peers = None if given.smoke else given.peers
    arguments = ["--conversations", str(size)] + (["--peers", str(peers)] if peers else [])
    results = rounds_in_turn(
        __file__, pythons_of(peers, "sglang", "idx"), arguments, 1 if given.smoke else given.rounds
    )
    report(results, "sglang")
    if peers:
        limits(results["ours"], peers / "lb")


if __name__ == "__main__":
    main()
