"""What does a block cost that is handed over in a shared arena, against one that is copied there?

Two processes on one arena, each with a pool: whole transfers, offer to confirm, of 10,240 blocks of 160 KiB and 128 of
12.5 MiB (Llama-2-13B, 2,048 tokens), nothing of them known to the receiver. `first`: the receiver maps the pages;
`again`: it holds others on them, both once warm; `cold`: `first`, right after the processes' start. `exchange_us` is
what a transfer of one block takes: `beyond_exchange` is what each block more adds to it. Reading handed KV for the
first time costs the kernel's mapping of it, told apart as `touch`.
`python benchmarks/bench_transfer_hand_over.py [--smoke]`; one JSON line a figure.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from typing import Any

from poolweave import KVLayout, MemPool
from poolweave.mempool import Arena, Blocks, PoolConfig
from poolweave.transfer import TransferConfig

SMOKE = "--smoke" in sys.argv
ROUNDS = 2 if SMOKE else 7
WARM, STEADY = (2, 2) if SMOKE else (150, 100)  # rounds of handed transfers that warm up, and that count
SCALE = 64 if SMOKE else 1
TOUCHED = 32  # blocks that are read for `touch`, at most
SMALL = KVLayout(num_layers=1, kv_heads=40, head_dim=128, block_tokens=8, dtype="float16")  # 160 KiB, one run
LARGE = KVLayout(num_layers=40, kv_heads=40, head_dim=128, block_tokens=16, dtype="float16")  # 12.5 MiB
spawn = multiprocessing.get_context("spawn")


def open_pool(layout: KVLayout, arena: Arena, name: str, hand_over: Any) -> MemPool:
    config = PoolConfig(transfer=TransferConfig(listen="arena", hand_over=hand_over))
    return MemPool(layout, instance=name, hbm=arena, config=config)


def serve(layout: KVLayout, arena: Arena, hand_over: str, pipe: Any) -> None:
    with open_pool(layout, arena, f"bench-target-{hand_over}", hand_over) as pool:
        pipe.send((pool.instance, pool.address))
        kept: list[Blocks] = []
        while (order := pipe.recv()) is not None:
            if order == "drop":
                while kept:
                    pool.free(kept.pop())
                pipe.send(0.0)
                continue
            blocks = pool.receive(order, 60).take()
            rows = pool.slots(blocks[:: -(-len(blocks) // TOUCHED)]).tolist()
            began = time.perf_counter()
            if order.endswith(b"touch"):
                for row in rows:
                    pool.view()[row].reshape(-1)[::2048].max()  # an element of each 4 KiB
            pipe.send((time.perf_counter() - began) * len(blocks) / len(rows))
            kept.append(blocks)


def measure(layout: KVLayout, num_blocks: int, hand_over: str) -> dict[str, float]:
    arena = Arena(2 * num_blocks * layout.block_bytes + (64 << 20))
    pipe, theirs = spawn.Pipe()
    child = spawn.Process(target=serve, args=(layout, arena, hand_over, theirs))
    child.start()
    seconds: dict[str, list[float]] = {"first": [], "again": [], "one": []}
    try:
        with open_pool(layout, arena, f"bench-source-{hand_over}", hand_over) as pool:
            name, address = pipe.recv()
            pool.connect(name, address)
            blocks = pool.alloc(num_blocks)
            pool.view()[pool.slots(blocks)] = 1
            pool.seal(blocks)

            def send(tag: bytes, some: Blocks = blocks) -> float:
                began = time.perf_counter()
                pool.transfer(name, some, tag=tag).result(60)
                taken = time.perf_counter() - began
                pipe.send(tag)
                seconds.setdefault("touch", []).append(pipe.recv()) if tag.endswith(b"touch") else pipe.recv()
                return taken

            handed = hand_over != "off"
            for number in range(WARM + STEADY if handed else ROUNDS):
                seconds["first"].append(send(b"first%d" % number))
                if handed:
                    seconds["again"].append(send(b"again%d" % number))
                    seconds["one"].append(send(b"one%d" % number, blocks[:1]))
                pipe.send("drop")
                pipe.recv()
            send(b"touch")
            pipe.send("drop")
            pipe.recv()
            pipe.send(None)
            child.join(60)
    finally:
        child.kill()
        child.join()
    if handed:
        seconds["cold"] = seconds["first"][:ROUNDS]
        for key in ("first", "again", "one"):
            seconds[key] = seconds[key][WARM:]
    return {key: statistics.median(values[1:] or values) * 1e6 for key, values in seconds.items() if values}


def main() -> None:
    for layout, count in ((SMALL, 10_240), (LARGE, 128)):
        num_blocks = count // SCALE
        handed = measure(layout, num_blocks, "require")
        copied = measure(layout, num_blocks, "off")
        exchange = handed.pop("one")
        sys.stdout.write(json.dumps({
            "bench": "transfer_hand_over", "blocks": num_blocks, "block_bytes": layout.block_bytes,
            "exchange_us": round(exchange, 1), "unit": "us/block",
            **{f"handed_{key}": round(value / num_blocks, 3) for key, value in handed.items()},
            "beyond_exchange": round((handed["first"] - exchange) / (num_blocks - 1), 3),
            "copied": round(copied["first"] / num_blocks, 3),
            "copied_over_handed": round(copied["first"] / handed["first"], 1),
        }) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
