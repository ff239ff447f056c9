"""How fast are KV events taken in, against Dynamo's RadixTree, each in the encoding it takes?

The prompts of workload.py as an engine publishes them: one BlockStored a prompt with what is new of it. Ours is
msgpack as vLLM sends it, theirs JSON through apply_event with block hashes computed before. CPU time, ours and theirs
in turn. `--peers DIR` names a folder with idx/bin/python that has ai-dynamo-runtime 1.6.1.

    python benchmarks/bench_kv_events.py --peers ~/.cache/poolweave-peers       (--smoke: 2 s, no peers)
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

from workload import BLOCK, prompts, pythons_of, report, rounds_in_turn


def stores(conversations: int) -> Iterator[tuple[list[int], list[int], int | None]]:
    """(tokens, block hashes, parent hash) of what each prompt adds."""
    names: dict[tuple[int, bytes], int] = {}
    for prompt in prompts(conversations):
        hashes, new, parent = [], 0, 0
        for at in range(0, len(prompt), BLOCK):
            key = (parent, prompt[at : at + BLOCK].tobytes())
            new += key in names
            parent = names.setdefault(key, (len(names) + 1) * 0x9E3779B97F4A7C15 % 2**64)
            hashes.append(parent)
        if new < len(hashes):
            yield prompt[new * BLOCK :].tolist(), hashes[new:], hashes[new - 1] if new else None


def ours(conversations: int) -> dict[str, float]:
    from poolweave.index.events import EventIndex
    from poolweave.index.events.wire import BlockStored, encode_batch

    fields = {"block_size": BLOCK, "lora_id": None, "lora_name": None, "medium": "GPU", "group_idx": 0}
    payloads, blocks = [], 0
    for tokens, hashes, parent in stores(conversations):
        event = BlockStored(block_hashes=hashes, parent_block_hash=parent, token_ids=tokens, **fields)
        payloads.append(encode_batch(0.0, [event], 0))
        blocks += len(hashes)
    index = EventIndex(BLOCK)
    feed = index.add_source("engine", can_replay=False)
    start = time.process_time()
    for sequence, payload in enumerate(payloads):
        feed.receive(sequence, payload)
    seconds = time.process_time() - start
    assert index.status()["engine"].num_blocks == blocks
    return {"blocks_per_s": blocks / seconds, "bytes_per_block": index.stats().nbytes / blocks}


def dynamo(conversations: int) -> dict[str, float]:
    from dynamo._core import RadixTree, compute_block_hash_for_seq

    payloads, blocks = [], 0
    for tokens, hashes, parent in stores(conversations):
        local = compute_block_hash_for_seq(tokens, BLOCK)
        pairs = [{"block_hash": h, "tokens_hash": t} for h, t in zip(hashes, local, strict=True)]
        data = {"stored": {"parent_hash": parent, "blocks": pairs}}
        payloads.append(json.dumps({"event_id": len(payloads), "dp_rank": 0, "data": data}).encode())
        blocks += len(hashes)
    tree = RadixTree()
    start = time.process_time()
    for payload in payloads:
        tree.apply_event(0, payload)
    tree.find_matches(local)
    return {"blocks_per_s": blocks / (time.process_time() - start)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--run", choices=["ours", "dynamo"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    size = 5 if given.smoke else given.conversations
    if given.run:
        print(json.dumps({"ours": ours, "dynamo": dynamo}[given.run](size)))
        return
    pythons = pythons_of(None if given.smoke else given.peers, "dynamo", "idx")
    arguments = ["--conversations", str(size)]
    report(rounds_in_turn(__file__, pythons, arguments, 1 if given.smoke else given.rounds), "dynamo")


if __name__ == "__main__":
    main()
