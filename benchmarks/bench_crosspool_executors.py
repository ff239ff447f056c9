"""How near to memory's speed do the decode executors run, how long is a hop, and how much faster is all of it than
transformers? (CrossPool's executors)

    python benchmarks/bench_crosspool_executors.py [--hidden 512 1024] [--dtype float32 bfloat16] [--smoke]

Batch 1. `attention` and `ffn`: the time of a plain streaming read of the bytes that a token needs (weights and KV) over
the executor's own, both from memory: the caches are filled with other data before each. `decode`: the engine's
tokens/s over those of transformers' eager attention with its cache, in as many threads as the engine has workers, same
dtype, one request of the Qwen3-MoE. `hop`: microseconds from one worker's end of a stage to the other's start. One
JSON line each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from poolweave.crosspool_engine import DecodeEngine, DecodeRequest, EngineConfig, ModelShape, Serving
from poolweave.crosspool_engine._native import KvView, streaming_read
from poolweave.crosspool_engine.kv_layout import kv_layout
from poolweave.crosspool_engine.models.attention_side import build_attention_stack
from poolweave.crosspool_engine.models.ffn_side import build_ffn_stack
from poolweave.crosspool_engine.models.random_models import save_random_models
from poolweave.crosspool_engine.models.split import load_attention, load_ffn

CONTEXT = 512
PROMPT = list(range(3, 19))


def against_streaming(run: Callable[[], None], nbytes: int, rounds: int) -> float:
    """Median of (streaming read of so many bytes) / (run), in turn, each from memory."""
    other, same = np.ones(64 << 20, np.uint8), np.ones(nbytes, np.uint8)
    ratios = []
    for _ in range(rounds):
        streaming_read(other)
        start = time.perf_counter()
        run()
        middle = time.perf_counter()
        streaming_read(other)
        again = time.perf_counter()
        streaming_read(same)
        ratios.append((time.perf_counter() - again) / (middle - start))
    return float(np.median(ratios))


def executors(path: str, dtype: str, rounds: int) -> dict[str, float]:
    shape = ModelShape.from_directory(path)
    size = {"float32": 4, "bfloat16": 2}[dtype]
    attention = build_attention_stack(load_attention(path, dtype=dtype))
    ffn = build_ffn_stack(load_ffn(path, dtype=dtype), transformers.AutoConfig.from_pretrained(path))
    layout = kv_layout(shape, dtype=dtype)
    blocks = layout.num_blocks(CONTEXT)
    kv = KvView(layout.view(np.full(blocks * layout.block_bytes, 1, np.uint8), blocks))
    x = np.random.default_rng(0).standard_normal((1, shape.hidden)).astype(np.float32)
    residual, normed, out = x.copy(), np.empty_like(x), np.empty_like(x)
    table, position = np.arange(blocks, dtype=np.int32)[None], np.array([CONTEXT - 1], np.int32)

    def attend() -> None:
        for layer in range(shape.num_layers):
            attention.attend(layer, kv, position, table, None, residual, normed)

    def feed() -> None:
        for layer in range(shape.num_layers):
            ffn.forward(layer, x, out)

    active = sum(shape.active_ffn_params(layer) for layer in range(shape.num_layers)) * size
    read = shape.attention_params * size + CONTEXT * layout.bytes_per_token
    return {"attention": against_streaming(attend, read, rounds), "ffn": against_streaming(feed, active, rounds)}


def eager_rate(path: str, dtype: str, new: int) -> float:
    """transformers' tokens/s, greedy, with its cache."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        prompt = torch.tensor([PROMPT])
        model.generate(prompt, max_new_tokens=4, do_sample=False)
        start = time.perf_counter()
        model.generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        return new / (time.perf_counter() - start)


def engine_rate(path: str, dtype: str, hidden: int, new: int) -> tuple[float, float]:
    """-> the engine's tokens/s, its median hop in us"""
    cores = sorted(os.sched_getaffinity(0))
    config = EngineConfig(
        kv_budget="64MiB", max_models=1, max_tokens=len(PROMPT) + new, max_hidden=hidden, reuse=False, events=4096,
        cores=(cores[0], cores[-1]),
    )  # fmt: skip
    with DecodeEngine(config) as engine:
        engine.activate("model", Serving(path=path, dtype=dtype))
        for name in ("warm", "counted"):
            engine.add(DecodeRequest(request_id=name, model="model", tokens=PROMPT, max_new_tokens=new))
            while engine.has_work:
                engine.step()
        stamps = engine.result("counted").stamps_ns
        stages = [stage for stage in engine.stages() if stage.start_ns > stamps[0]]
    hops = [b.start_ns - a.end_ns for a, b in itertools.pairwise(stages) if a.worker != b.worker]
    return (new - 1) / (stamps[-1] - stamps[0]) * 1e9, float(np.median(hops)) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--smoke", action="store_true", help="the executors of one small size, to see that it runs")
    options = parser.parse_args()
    sizes, layers, rounds = ([128], 1, 1) if options.smoke else (options.hidden, 4, options.rounds)
    torch.set_num_threads(2)
    for hidden in sizes:
        for dtype in options.dtype[:1] if options.smoke else options.dtype:
            with tempfile.TemporaryDirectory() as folder:
                paths = save_random_models(Path(folder), hidden=hidden, layers=layers, dtype=dtype)
                common = {"bench": "crosspool_executors", "hidden": hidden, "dtype": dtype}
                for name, path in paths.items():
                    for part, ratio in executors(path, dtype, rounds).items():
                        print(json.dumps({**common, "model": name, "part": part, "to_streaming": round(ratio, 2)}))
                if options.smoke:
                    return
                eager = eager_rate(paths["qwen3"], dtype, 64)
                own, hop = engine_rate(paths["qwen3"], dtype, hidden, 64)
                print(json.dumps({
                    **common, "model": "qwen3", "part": "decode", "tokens_per_s": round(own), "eager": round(eager),
                    "to_eager": round(own / eager, 2), "hop_us_p50": round(hop, 2),
                }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
