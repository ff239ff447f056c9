"""How much does a cached prefix save, and what does paged KV cost a decode step?

TTFT: one request of `--prompt` tokens, a share of which lies in the pool's blocks (MemServe's TTFT over cached ratio).
Decode: tokens/s of a batch against `transformers`' generation with its own cache (eager and sdpa), same weights, same
threads, steps of all of them interleaved, so that a busy machine slows all alike.

    python benchmarks/bench_engine.py --model smollm2 --threads 1          # one JSON line a point; --smoke: seconds
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from poolweave.mempool import MemPool
from poolweave.serving.engine import EngineConfig, LoadedModel, SamplingParams, Sequence, TorchEngine, load_model


def prompt(model: LoadedModel, length: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.model.config.vocab_size, (length,), generator=draw).tolist()


def baseline(model: LoadedModel, attention: str) -> Any:
    """The same weights, not copied, under one of `transformers`' own attentions."""
    source = model.model
    with torch.device("meta"):
        config = copy.deepcopy(source.config)
        twin = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=source.dtype)
    twin.load_state_dict(source.state_dict(), assign=True)
    for ours, theirs in zip(twin.modules(), source.modules(), strict=True):
        ours._buffers.update(theirs._buffers)
    return twin.eval()


def answer_one(engine: TorchEngine, sequence: Sequence) -> float:
    """Seconds from add to the first token."""
    start = time.perf_counter()
    engine.add(sequence)
    while not engine.step():
        pass
    return time.perf_counter() - start


def ttft(model: LoadedModel, pool: MemPool, lengths: list[int], ratios: list[float], rounds: int) -> Iterator[Any]:
    engine = TorchEngine(model, pool, EngineConfig(num_threads=torch.get_num_threads()))
    params = SamplingParams(max_new_tokens=1)
    for length in lengths:
        tokens = prompt(model, length, length)
        first = Sequence("first", tokens, params)
        answer_one(engine, first)
        for ratio in ratios:
            blocks = first.blocks[: min(int(ratio * length), length - 1) // pool.layout.block_tokens]
            seconds = []
            for _ in range(rounds):
                pool.retain(blocks)
                cached = len(blocks) * pool.layout.block_tokens
                sequence = Sequence("r", tokens, params, blocks=blocks, num_computed=cached)
                seconds.append(answer_one(engine, sequence))
                pool.free(sequence.blocks)
            yield {"metric": "ttft", "unit": "s", "prompt": length, "cached": cached, "p50": statistics.median(seconds)}
        pool.free(first.blocks)


def ours(model: LoadedModel, pool: MemPool, batch: int, length: int, num_tokens: int) -> Callable[[], object]:
    """A function that decodes one token for each of `batch` sequences of `length` tokens."""
    config = EngineConfig(step_tokens=max(512, batch), num_threads=torch.get_num_threads())
    engine = TorchEngine(model, pool, config)
    params = SamplingParams(max_new_tokens=num_tokens + batch * length, ignore_eos=True)
    for index in range(batch):
        engine.add(Sequence(str(index), prompt(model, length, index), params))
    while len(engine.step()) < batch:
        pass
    return engine.step


def theirs(model: LoadedModel, attention: str, batch: int, length: int) -> Callable[[], object]:
    twin = baseline(model, attention)
    cache = DynamicCache(config=twin.config)
    with torch.inference_mode():
        tokens = torch.tensor([prompt(model, length, index) for index in range(batch)])
        state = {"logits": twin(tokens, cache=cache, use_cache=True, logits_to_keep=1).logits}

    def step() -> None:
        with torch.inference_mode():
            tokens = state["logits"][:, -1].argmax(-1, keepdim=True)
            state["logits"] = twin(tokens, cache=cache, use_cache=True).logits

    return step


def decode(model: LoadedModel, order: Any, batch: int, length: int, steps: int) -> Iterator[Any]:
    layout = replace(model.layout, order=order)
    room = batch * layout.num_blocks(length + 2 * steps + batch) * layout.block_bytes
    with MemPool(layout, hbm=2 * room) as pool:
        contenders = {
            f"poolweave {order}": ours(model, pool, batch, length, 2 * steps),
            "transformers eager": theirs(model, "eager", batch, length),
            "transformers sdpa": theirs(model, "sdpa", batch, length),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(steps):
            for name, step in contenders.items():
                start = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        ratio = median / medians["transformers eager"]
        point = {"metric": "decode", "unit": "tokens/s", "engine": name, "batch": batch, "context": length}
        yield {**point, "p50": batch / median, "best": batch / min(seconds[name]), "time_over_eager": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a model directory, or smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--cached", type=float, nargs="+", default=[0.0, 0.5, 0.9])
    parser.add_argument("--decode", nargs="+", default=["1x64", "1x1024", "8x256"], help="batch x context")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.prompt, options.cached, options.decode, options.steps = [64], [0.0, 0.9], ["2x32"], 2
    torch.set_num_threads(options.threads)
    model = load_model(options.model)
    room = model.layout.num_blocks(max(options.prompt) + 1) * model.layout.block_bytes
    with MemPool(model.layout, hbm=4 * room) as pool:
        for point in ttft(model, pool, options.prompt, options.cached, 1 if options.smoke else 3):
            print(json.dumps(point), flush=True)
    for size in options.decode:
        batch, length = map(int, size.split("x"))
        for order in ("aggregated", "layered"):
            for point in decode(model, order, batch, length, options.steps):
                print(json.dumps(point), flush=True)


if __name__ == "__main__":
    main()
