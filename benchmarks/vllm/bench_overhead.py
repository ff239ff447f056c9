"""What does the connector cost where nothing is ever reused?

Two real vLLM engines on SmolLM2, one alone and one with PoolConnector, compute the same prompts, never seen before, in
turn: 4 prompts of 256 tokens, 32 tokens each to answer. With `--pool` a pool process takes all KV as well.
`POOLWEAVE_VLLM_PYTHON=... python benchmarks/vllm/bench_overhead.py [--pool] [--smoke]`; `ratio` is the median of the
connector's seconds over vLLM's, pair by pair.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "vllm"))
from engines import EngineProcess, ask

from poolweave.serving.engine.smollm2 import smollm2_directory
from poolweave.serving.pool_process.service import PoolServiceConfig
from poolweave.serving.process.child import Child, Program

ROUNDS = 2 if "--smoke" in sys.argv else 21


def main() -> None:
    name = f"bench-{os.getpid()}"
    keeper, pool = None, {"size": "512MiB"}
    if "--pool" in sys.argv:
        keeper = Child(
            Program(name, "poolweave.serving.pool_process.service", PoolServiceConfig(name=name, size="512MiB"))
        )
        keeper.wait_ready(60)
        pool["pool"] = name
    model = smollm2_directory()
    more: dict[str, Any] = {"skip_tokenizer_init": True, "enable_prefix_caching": True}
    engines = [EngineProcess(model, **more), EngineProcess(model, pool=pool, **more)]
    rng = np.random.default_rng(0)
    for engine in engines:
        engine.generate(ask(rng.integers(3, 40000, 256).tolist(), max_tokens=32))
    pairs = []
    for turn in range(ROUNDS):
        prompts = [ask(rng.integers(3, 40000, 256).tolist(), max_tokens=32) for _ in range(4)]
        order = (0, 1) if turn % 2 else (1, 0)
        told = {i: engines[i].call("generate", prompts=prompts) for i in order}
        assert [a["tokens"] for a in told[0]["answers"]] == [a["tokens"] for a in told[1]["answers"]]
        pairs.append((told[0]["seconds"], told[1]["seconds"]))
    ratio = statistics.median(ours / theirs for theirs, ours in pairs)
    point = {"pool_process": keeper is not None, "rounds": ROUNDS, "ratio": round(ratio, 3)}
    print(json.dumps({**point, "vllm_s": round(statistics.median(theirs for theirs, _ in pairs), 3)}))
    for engine in engines:
        engine.close()
    if keeper is not None:
        keeper.close()


if __name__ == "__main__":
    main()
