"""Does control lowering, does the pipeline, do both together raise decode throughput? (CrossPool Table 3)

    python benchmarks/bench_crosspool_ablation.py [--hidden 256 512 1024] [--rounds 5] [--smoke]

Three small random models (Qwen3-MoE, DeepSeek-V2, GLM) on one engine: an attention worker and an FFN rank, pinned to
two cores. The four cells run the same native executors in the same processes, in turn within each round, so that
ratios come from one run. One JSON line a hidden size and cell: median tokens/s over the rounds, the ratio to both
off, and the time between tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from poolweave.crosspool_engine import DecodeEngine, DecodeRequest, EngineConfig

CELLS = {
    "off/off": {"lowered": False, "in_flight": 1},
    "lowering": {"lowered": True, "in_flight": 1},
    "pipeline": {"lowered": False, "in_flight": 2},
    "both": {"lowered": True, "in_flight": 2},
}
PROMPT = 8


def make_models(folder: Path, hidden: int, layers: int) -> dict[str, str]:
    """Random weights in the shape of the paper's three models, `hidden` wide."""
    base = {
        "vocab_size": 2048, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": hidden // 64,
        "num_experts_per_tok": 2, "max_position_embeddings": 1024, "intermediate_size": 2 * hidden,
        "moe_intermediate_size": hidden // 2,
    }  # fmt: skip
    latent = {
        "num_key_value_heads": hidden // 64, "n_routed_experts": 16, "n_shared_experts": 1, "kv_lora_rank": hidden // 4,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_group": 1, "topk_group": 1,
        "q_lora_rank": None,
    }  # fmt: skip
    configs = {
        "qwen3": {"model_type": "qwen3_moe", "num_key_value_heads": max(1, hidden // 256), "head_dim": 64,
                  "num_experts": 16, "norm_topk_prob": True},
        "deepseek": {"model_type": "deepseek_v2", "first_k_dense_replace": 1, "topk_method": "greedy", **latent},
        "glm": {"model_type": "glm4_moe_lite", **latent},
    }  # fmt: skip
    paths = {}
    for seed, (name, config) in enumerate(configs.items()):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**base, **config))
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.normal_(0, weight.shape[-1] ** -0.5)
        model.save_pretrained(folder / name)
        paths[name] = str(folder / name)
    return paths


def run_cell(engine: DecodeEngine, cell: str, new_tokens: int) -> tuple[float, np.ndarray, dict[str, list[int]]]:
    """-> tokens/s from the first token drawn to the last, times between tokens in ms, tokens by request."""
    engine.set_control(**CELLS[cell])
    names = [f"{model}{n}" for n in range(2) for model in engine.stats().models]
    for index, name in enumerate(names):
        prompt = [(37 * index + 11 * t) % 2048 for t in range(PROMPT)]
        engine.add(DecodeRequest(request_id=name, model=name[:-1], tokens=prompt, max_new_tokens=new_tokens))
    while engine.has_work:
        engine.step()
    results = {name: engine.result(name) for name in names}
    stamps = [result.stamps_ns for result in results.values()]
    seconds = (max(s[-1] for s in stamps) - min(s[0] for s in stamps)) / 1e9
    rate = (sum(map(len, stamps)) - 1) / seconds
    gaps = np.concatenate([np.diff(s) for s in stamps]) / 1e6
    return rate, gaps, {name: result.tokens.tolist() for name, result in results.items()}


def bench(hidden: int, layers: int, rounds: int, new_tokens: int, commit: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        paths = make_models(Path(folder), hidden, layers)
        config = EngineConfig(
            kv_budget="64MiB", max_models=3, max_tokens=PROMPT + new_tokens, max_hidden=hidden,
            cores=(cores[0], cores[-1]),
        )  # fmt: skip
        with DecodeEngine(config) as engine:
            for name, path in paths.items():
                engine.activate(name, path)
            rates: dict[str, list[float]] = {cell: [] for cell in CELLS}
            gaps: dict[str, list[np.ndarray]] = {cell: [] for cell in CELLS}
            tokens = None
            for _ in range(rounds + 1):  # the first warms up and is not counted
                for cell in CELLS:
                    rate, between, drawn = run_cell(engine, cell, new_tokens)
                    rates[cell].append(rate)
                    gaps[cell].append(between)
                    assert tokens is None or tokens == drawn, f"{cell} decoded other tokens"
                    tokens = drawn
    for cell in CELLS:
        rate = statistics.median(rates[cell][1:])
        ratio = statistics.median(a / b for a, b in zip(rates[cell][1:], rates["off/off"][1:], strict=True))
        p50, p95, p99 = np.percentile(np.concatenate(gaps[cell][1:]), [50, 95, 99])
        print(json.dumps({
            "bench": "crosspool_ablation", "hidden": hidden, "layers": layers, "cell": cell, "unit": "tokens/s",
            "median": round(rate, 1), "ratio": round(ratio, 2), "tbt_ms_p50": round(float(p50), 3),
            "tbt_ms_p95": round(float(p95), 3), "tbt_ms_p99": round(float(p99), 3), "rounds": rounds, "commit": commit,
        }), flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--smoke", action="store_true", help="one round of a few tokens, to see that it runs")
    options = parser.parse_args()
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if options.smoke:
        bench(256, 2, 1, 4, git.stdout.strip())
        return
    for hidden in options.hidden:
        bench(hidden, options.layers, options.rounds, options.tokens, git.stdout.strip())


if __name__ == "__main__":
    main()
