"""How long does routing one prompt take? Hash, match, predict, choose and count, against Dynamo's hash + match alone.

The prompts of workload.py, each held by two of 64 (and 512) instances, 1M (instance, block) entries. Rounds of ours and
Dynamo's RadixTree alternate; the ratio is of the medians of one round. Dynamo is run when `--peer` names a Python that
has ai-dynamo-runtime.

    python benchmarks/bench_route.py --peer ~/.cache/poolweave-peers/idx/bin/python
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from workload import BLOCK, prompts


def placements(count: int, instances: int) -> Iterator[tuple[int, int]]:
    """(prompt, instance): each prompt is held by two instances."""
    draw = random.Random(5)
    for prompt in range(count):
        for instance in draw.sample(range(instances), 2):
            yield prompt, instance


def measure(call: Callable[[int], object], order: Sequence[int]) -> list[float]:
    """Microseconds a call."""
    times = []
    for prompt in order:
        start = time.perf_counter_ns()
        call(prompt)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def ours(tokens: Any, instances: int, entries: int) -> tuple[Callable[[int], object], Callable[[int], object], float]:
    """Route with arrays, route with lists, and bytes an entry."""
    from poolweave.scheduler import ArchitectureModel, GlobalScheduler
    from poolweave.types import Role

    scheduler = GlobalScheduler(ArchitectureModel(constant_s=5e-3, linear_s=1e-4, quadratic_s=2e-9))
    for i in range(instances):
        scheduler.add(f"i{i}", Role.COLOCATED)
    last = 0
    for prompt, instance in placements(len(tokens), instances):
        scheduler.holdings.learned(f"i{instance}", scheduler.holdings.keys(tokens[prompt]))
        last = prompt
        if scheduler.holdings.stats()[Role.COLOCATED].entries > entries:
            break
    stats = scheduler.holdings.stats()[Role.COLOCATED]
    lists = [tokens[i].tolist() for i in range(min(last, 500))]

    def route(prompt: int) -> None:
        scheduler.prefilled(scheduler.route(tokens[prompt % last]).request_id)

    def route_list(prompt: int) -> None:
        scheduler.prefilled(scheduler.route(lists[prompt % len(lists)]).request_id)

    return route, route_list, stats.nbytes / stats.entries


def dynamo(tokens: Any, entries: int) -> Callable[[int], object]:
    """Hash + find over 64 workers, as its own router calls it."""
    from dynamo._core import RadixTree, compute_block_hash_for_seq  # type: ignore[import-not-found]

    tree, held, told, last = RadixTree(), [set[int]() for _ in range(64)], 0, 0
    for event, (prompt, worker) in enumerate(placements(len(tokens), 64)):
        hashes = compute_block_hash_for_seq(tokens[prompt].tolist(), BLOCK)
        chain = [hash(tuple(hashes[: i + 1])) & (2**63 - 1) for i in range(len(hashes))]
        start = next((i for i, key in enumerate(chain) if key not in held[worker]), len(chain))
        held[worker].update(chain[start:])
        blocks = [{"block_hash": chain[i], "tokens_hash": hashes[i]} for i in range(start, len(chain))]
        data = {"stored": {"parent_hash": chain[start - 1] if start else None, "blocks": blocks}}
        tree.apply_event(worker, json.dumps({"event_id": event, "dp_rank": 0, "data": data}).encode())
        told, last = told + len(blocks), prompt
        if told > entries:
            break
    lists = [tokens[i].tolist() for i in range(min(last, 500))]
    return lambda prompt: tree.find_matches(compute_block_hash_for_seq(lists[prompt % len(lists)], BLOCK))


def peer_rounds(path: str, entries: int) -> None:
    """The other process: one line of microseconds for each line of prompts on stdin."""
    find = dynamo(np.load(path, mmap_mode="r"), entries)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(find, json.loads(line))), flush=True)


def report(name: str, times: list[float], **numbers: float) -> None:
    cuts = statistics.quantiles(times, n=100)
    print(json.dumps({"metric": name, "unit": "us", "p50": cuts[49], "p95": cuts[94], "p99": cuts[98], **numbers}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python with ai-dynamo-runtime")
    parser.add_argument("--smoke", action="store_true", help="seconds instead of a minute")
    parser.add_argument("--peer-rounds", help=argparse.SUPPRESS)
    parser.add_argument("--entries", type=int, default=1_000_000)
    arguments = parser.parse_args()
    if arguments.peer_rounds:
        return peer_rounds(arguments.peer_rounds, arguments.entries)
    entries, rounds = (20_000, 1) if arguments.smoke else (arguments.entries, 7)
    tokens = prompts(20 if arguments.smoke else 500)
    draw = random.Random(1)
    orders = [[draw.randrange(10_000) for _ in range(100 if arguments.smoke else 500)] for _ in range(rounds)]
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "prompts.npy", tokens)
        command = [arguments.peer, __file__, "--peer-rounds", f"{folder}/prompts.npy", "--entries", str(entries)]
        peer = None
        if arguments.peer:
            peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert peer.stdout is not None
            peer.stdout.readline()
        for instances in (64, 512):
            compare(tokens, instances, entries, orders, peer)
        if peer is not None:
            peer.communicate()


def compare(
    tokens: Any, instances: int, entries: int, orders: list[list[int]], peer: subprocess.Popen[str] | None
) -> None:
    route, route_list, entry_bytes = ours(tokens, instances, entries)
    times: dict[str, list[float]] = {"array": [], "list": [], "dynamo": []}
    ratios = []
    for order in orders:
        one = {"array": measure(route, order), "list": measure(route_list, order)}
        if peer is not None and peer.stdin is not None and peer.stdout is not None:
            print(json.dumps(order), file=peer.stdin, flush=True)
            one["dynamo"] = json.loads(peer.stdout.readline())
            ratios.append([statistics.median(one[k]) / statistics.median(one["dynamo"]) for k in ("array", "list")])
        for kind, measured in one.items():
            times[kind] += measured
    report(f"route, {instances} instances, array", times["array"], entry_bytes=entry_bytes)
    report(f"route, {instances} instances, list", times["list"])
    if ratios:
        report("dynamo hash + find, 64 workers, list", times["dynamo"])
        for kind, column in zip(("array", "list"), zip(*ratios, strict=True), strict=True):
            middle = statistics.median(column)
            print(
                json.dumps({"metric": f"route / dynamo, {instances} instances, {kind}", "unit": "ratio", "p50": middle})
            )


if __name__ == "__main__":
    main()
