"""How long after a client went away are its blocks free, at the instances? (C33: within 200 ms)

A door with a colocated instance, and one with a pair of prefill and decode instances, with a real engine and a small
random model (`--smollm2`: SmolLM2-135M, whose steps take long on a CPU). A client asks for a long streamed answer and
closes its connection: during prefill, in the first tokens, and in the middle of decode. From there to the moment at
which every instance, asked directly again and again, says that no block of its pool is in use; the asking itself
(`asking_ms`) is part of it. Goal: p95 under 200 ms.
`python benchmarks/bench_gone_client.py [--smoke] [--smollm2]`; one JSON line a case. Needs the serve extra.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "reference"))

from ref_transformers import save_random_model, save_tokenizer
from ref_waiting import until
from ref_whole import members

from poolweave.config import from_mapping
from poolweave.serving.control.messages import Counters, Stats
from poolweave.serving.deployment import Deployment, DeploymentConfig
from poolweave.serving.instance.client import InstanceClient

SMOKE = "--smoke" in sys.argv
ROUNDS = 2 if SMOKE else 20
MODEL = "smollm2" if "--smollm2" in sys.argv else "mixtral"
LAYOUTS = {"colocated": ("colocated",), "pair": ("prefill", "decode")}
STAGES = {"prefill": 0, "first tokens": 1, "decode": 40}  # tokens seen by the client when it goes
PROMPT = [50, 60, 70, 80] * 100
GOAL_MS = 200.0


def settings(path: str, roles: tuple[str, ...]) -> DeploymentConfig:
    """On free ports, with a lease that hides nothing."""
    mapping = {
        "models": [{"name": MODEL, "path": path}],
        "door": {"listen": "127.0.0.1:0"},
        "spares": 0,
        "instances": [{"name": f"{role}-{os.getpid()}", "role": role, "hbm": "64MiB"} for role in roles],
    }
    return from_mapping(mapping, DeploymentConfig)


def held(instances: list[InstanceClient]) -> int:
    """Blocks that requests hold, over all pools."""
    return sum(one.call(Stats(), Counters).pool["hbm"]["active"] for one in instances)


def ask(made: Deployment, number: int) -> socket.socket:
    """A long streamed answer to a prompt that nobody has asked before."""
    prompt = [100 + number // 100, 110 + number % 100, *PROMPT]
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 400, "stream": True, "ignore_eos": True})
    parts = urlsplit(made.url)
    client = socket.create_connection((parts.hostname, parts.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    client.sendall(f"{head}\r\n\r\n{body}".encode())
    return client


def freed_ms(made: Deployment, instances: list[InstanceClient], number: int, tokens: int) -> float:
    """From the client's end to that of its blocks."""
    client, seen = ask(made, number), b""
    until(lambda: held(instances), "it is inside")
    while seen.count(b"data: {") < tokens:
        seen += client.recv(4096)
    assert held(instances), "it is still inside"
    begun = time.perf_counter()
    client.close()
    until(lambda: not held(instances), "its blocks are free")
    return (time.perf_counter() - begun) * 1e3


def say(layout: str, stage: str, times: list[float], asking_ms: float) -> None:
    ordered = sorted(times)
    p95 = ordered[max(0, round(0.95 * len(ordered)) - 1)]
    figures = {"p50": ordered[len(ordered) // 2], "p95": p95, "max": ordered[-1], "asking_ms": asking_ms}
    point = {
        "model": MODEL,
        "layout": layout,
        "stage": stage,
        **{name: round(value, 1) for name, value in figures.items()},
    }
    print(json.dumps({"bench": "gone_client", **point, "unit": "ms", "goal_ms": GOAL_MS}), flush=True)


def measure(layout: str, made: Deployment) -> None:
    with ExitStack() as opened:
        instances = []
        for member in members(made).values():
            client = InstanceClient(member.addresses[0], peer=member.name)
            opened.callback(client.close)
            instances.append(client)
        begun = time.perf_counter()
        held(instances)
        asking_ms = (time.perf_counter() - begun) * 1e3
        for at, (stage, tokens) in enumerate(STAGES.items()):
            times = [freed_ms(made, instances, at * ROUNDS + n, tokens) for n in range(ROUNDS)]
            say(layout, stage, times, asking_ms)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_tokenizer(save_random_model("mixtral", Path(scratch) / "mixtral", vocab_size=260))
        for layout, roles in LAYOUTS.items():
            with Deployment(settings(MODEL if MODEL == "smollm2" else str(folder), roles)) as made:
                measure(layout, made)


if __name__ == "__main__":
    main()
