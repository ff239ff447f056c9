"""Does control lowering, does the pipeline, do both together raise decode throughput? (CrossPool Table 3)

    python benchmarks/bench_crosspool_ablation.py [--hidden 256 512 1024] [--rounds 5] [--dtype float32] [--smoke]

Three small random models (Qwen3-MoE, DeepSeek-V2, GLM) on one engine: an attention worker and an FFN rank, pinned to
two cores. The four cells run the same native executors in the same processes, in turn within each round, so that
ratios come from one run. One JSON line a hidden size and cell: median tokens/s over the rounds, the median ratio to
both off, and the time between tokens. `poolweave bench crosspool` draws the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess

from poolweave.serving.ablation import AblationConfig, run_ablation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--smoke", action="store_true", help="one round of a few tokens, to see that it runs")
    options = parser.parse_args()
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    config = AblationConfig(
        hidden=tuple(options.hidden), layers=options.layers, rounds=options.rounds, tokens=options.tokens,
        dtype=options.dtype,
    )  # fmt: skip
    if options.smoke:
        config = AblationConfig(hidden=(256,), layers=2, rounds=1, tokens=4)
    for cell in run_ablation(config).cells:
        figures = {name: round(v, 3) if isinstance(v, float) else v for name, v in dataclasses.asdict(cell).items()}
        print(json.dumps({
            "bench": "crosspool_ablation", "layers": config.layers, "rounds": config.rounds, "dtype": config.dtype,
            **figures, "commit": git.stdout.strip(),
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
