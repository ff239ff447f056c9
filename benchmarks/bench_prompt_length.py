"""How does matching a prompt grow with its length, against vLLM's hash index? (MemServe Fig. 10)

One prompt, wholly cached, of 256 to 32,768 tokens, block 16. Ours is `RadixIndex.match`. vLLM's is what its scheduler
does for a new request: hash every block (its `hash_block_tokens`, by each hash function it offers here), then look each
hash up in a dictionary until one is missing. CPU time, ours and theirs in turn. `--peers DIR` names a folder with
vllm_src/ (the wheel of vLLM 0.32.0, unpacked); `--plot FILE` draws the table with matplotlib.

    python benchmarks/bench_prompt_length.py --peers ~/.cache/poolweave-peers --plot lengths.png       (--smoke: 2 s)
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import pickle
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from workload import BLOCK

LENGTHS = (256, 1024, 4096, 8192, 16_384, 32_768)
# vLLM's vllm/utils/hashing.py: pickle, then the function that the setting prefix_caching_hash_algo names
HASHES: Mapping[str, Callable[[Any], bytes]] = {
    "sha256": lambda value: hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest(),
    "xxhash": lambda value: xxhash.xxh3_128_digest(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)),
}


def cpu_us(call: Callable[[], object], seconds: float) -> float:
    call()
    count, start = 0, time.process_time()
    while (spent := time.process_time() - start) < seconds:
        call()
        count += 1
    return spent / count * 1e6


def ours(prompt: Any) -> Callable[[], object]:
    from poolweave.index import RadixIndex

    index = RadixIndex(BLOCK)
    index.insert(prompt, np.arange(len(prompt) // BLOCK, dtype=np.uint64))
    assert index.match(prompt).num_tokens == len(prompt)
    return lambda: index.match(prompt)


def hash_block_tokens(peers: Path) -> Callable[..., Any]:
    """vLLM's own function, out of its source, without what the rest of the module imports."""
    path = peers / "vllm_src/vllm/v1/core/kv_cache_utils.py"
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "hash_block_tokens"]
    names: dict[str, Any] = {
        "Any": Any, "Callable": Callable, "Sequence": Sequence, "BlockHash": bytes, "NONE_HASH": bytes(32),
    }  # fmt: skip
    exec(compile(tree, str(path), "exec"), names)
    found: Callable[..., Any] = names["hash_block_tokens"]
    return found


def theirs(
    prompt: list[int], hash_tokens: Callable[..., Any], function: Callable[[Any], bytes]
) -> Callable[[], object]:
    held: dict[bytes, int] = {}

    def chain() -> list[bytes]:
        keys, parent = [], None
        for at in range(0, len(prompt), BLOCK):
            parent = hash_tokens(function, parent, prompt[at : at + BLOCK], None)
            keys.append(parent)
        return keys

    def match() -> int:
        for count, key in enumerate(chain()):
            if held.get(key) is None:
                return count
        return len(held)

    held.update({key: i for i, key in enumerate(chain())})
    assert match() == len(prompt) // BLOCK
    return match


def measure(length: int, peers: Path | None, rounds: int, seconds: float) -> dict[str, float]:
    prompt = np.random.default_rng(1).integers(0, 128_000, length, dtype=np.int32)
    calls = {"ours_us": ours(prompt)}
    if peers:
        hash_tokens = hash_block_tokens(peers)
        calls |= {f"vllm_{name}_us": theirs(prompt.tolist(), hash_tokens, each) for name, each in HASHES.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(cpu_us(call, seconds))
    return {"tokens": length} | {name: round(statistics.median(taken), 3) for name, taken in times.items()}


def plot(points: list[dict[str, float]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name in (name for name in points[0] if name != "tokens"):
        axes.plot([p["tokens"] for p in points], [p[name] for p in points], marker="o", label=name.removesuffix("_us"))
    axes.set(xscale="log", yscale="log", xlabel="prompt tokens, all cached", ylabel="us a match (CPU time)")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--plot", type=Path, help="where the picture goes")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    rounds, seconds = (1, 0.01) if given.smoke else (5, 0.1)
    points = [measure(n, None if given.smoke else given.peers, rounds, seconds) for n in LENGTHS]
    for point in points:
        print(json.dumps(point))
    if given.plot:
        plot(points, given.plot)


if __name__ == "__main__":
    main()
