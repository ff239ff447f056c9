"""How much faster does one request decode than in transformers, and how long is a hop between workers? (CrossPool)

    python benchmarks/bench_crosspool_decode.py [--hidden 512 1024] [--dtype float32 bfloat16] [--rounds 3] [--smoke]

`to_eager`: the engine's tokens/s over those of transformers' eager attention with its cache, in as many threads as the
engine has workers, same dtype, one request; in turn, medians over the rounds. `hop_us_p50`: microseconds from one
worker's end of a stage to the other's start. One JSON line each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from poolweave.crosspool_engine import DecodeEngine, DecodeRequest, EngineConfig, Serving
from poolweave.crosspool_engine.models.random_models import save_random_models

PROMPT = list(range(3, 19))


def eager_model(path: str, dtype: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()


def eager_rate(model: Any, new: int) -> float:
    """transformers' tokens/s, greedy, with its cache."""
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


def compare(path: str, dtype: str, hidden: int, options: argparse.Namespace) -> dict[str, float]:
    model = eager_model(path, dtype)
    rounds = []
    for _ in range(options.rounds):
        own, hop = engine_rate(path, dtype, hidden, options.tokens)
        eager = eager_rate(model, options.tokens)
        rounds.append((own, eager, own / eager, hop))
    medians = np.median(np.array(rounds), axis=0).tolist()
    return {
        name: round(v, 2) for name, v in zip(("tokens_per_s", "eager", "to_eager", "hop_us_p50"), medians, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--smoke", action="store_true", help="one small size and few tokens, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.hidden, options.dtype, options.rounds, options.tokens = [128], ["float32"], 1, 4
    torch.set_num_threads(2)
    for hidden, dtype in itertools.product(options.hidden, options.dtype):
        with tempfile.TemporaryDirectory() as folder:
            for name, path in save_random_models(Path(folder), hidden=hidden, layers=4, dtype=dtype).items():
                common = {"bench": "crosspool_decode", "hidden": hidden, "dtype": dtype, "model": name}
                print(json.dumps({**common, **compare(path, dtype, hidden, options)}), flush=True)


if __name__ == "__main__":
    main()
