"""How long after a kill is a deployment whole again? (MemServe 4.4: failures at instance granularity)

A deployment of prefill, decode, colocated and CrossPool instances, with a real engine and a small random model. From
SIGKILL to the moment at which every part has a process, the registry names every instance and the door routes to each:
for each kind of part alone, for several at once, and for a second one killed as soon as the first is whole again, when
the next process that waits to follow is still on its way; and from SIGSTOP, for each that is never let go on. Goal:
under two TTLs of the membership (10 s by default).
`python benchmarks/bench_recovery.py [--smoke]`; one JSON line a case. Needs the serve extra.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "reference"))

import psutil
from ref_transformers import save_random_model, save_tokenizer
from ref_waiting import until
from ref_whole import Whole

from poolweave.config import from_mapping
from poolweave.serving.deployment import Deployment, DeploymentConfig

SMOKE = "--smoke" in sys.argv
ROUNDS = 1 if SMOKE else 3
MODEL = "mixtral"
KINDS = ("prefill", "decode", "colocated", "crosspool")
SPARES = 2  # as by default
ALONE = [(kind,) for kind in ("coordinator", "door", *KINDS)]
AT_ONCE = [
    ("prefill", "decode"),
    ("decode", "crosspool"),
    ("coordinator", "decode"),
    ("prefill", "decode", "door"),
    KINDS,
    ("coordinator", "door", *KINDS),
]
_IMPORTED = 150 << 20
CASES = [("door",), ("decode",)] if SMOKE else [*ALONE, *AT_ONCE]


def settings(folder: Path) -> DeploymentConfig:
    """One instance of each kind, on free ports, with the default membership."""
    crosspool = {"kv_budget": "8MiB", "max_tokens": 512, "max_batch": 2}
    instances: list[dict[str, Any]] = [{"name": name(kind), "role": kind, "hbm": "16MiB"} for kind in KINDS[:3]]
    more = {"name": name("crosspool"), "role": "decode", "kind": "crosspool", "hbm": "16MiB", "crosspool": crosspool}
    mapping = {
        "models": [{"name": MODEL, "path": str(folder)}],
        "door": {"listen": "127.0.0.1:0"},
        "instances": instances if SMOKE else [*instances, more],
    }
    return from_mapping(mapping, DeploymentConfig)


def name(part: str) -> str:
    return f"{part}-{os.getpid()}" if part in KINDS else part


def waits(made: Deployment) -> bool:
    """The spares do, and have imported everything: they compute nothing any more."""
    spares = [psutil.Process(pid) for pid in (made.spares.pids if made.spares is not None else ())]
    before = [spare.cpu_times() for spare in spares]
    time.sleep(0.3)
    imported = all(spare.memory_info().rss > _IMPORTED for spare in spares)
    return len(spares) == SPARES and imported and [spare.cpu_times() for spare in spares] == before


def recovery_s(made: Deployment, parts: tuple[str, ...], number: signal.Signals = signal.SIGKILL) -> float:
    whole = Whole(made)
    begun = time.perf_counter()
    whole.kill((name(part) for part in parts), number)
    until(whole.again, f"{parts} are back", 200)
    return time.perf_counter() - begun


def say(case: str, times: list[float], ttl_s: float) -> None:
    point = {"case": case, "whole_s": [round(t, 2) for t in times], "worst_s": round(max(times), 2), "unit": "s"}
    print(json.dumps({"bench": "recovery", **point, "two_ttls_s": 2 * ttl_s}), flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_tokenizer(save_random_model(MODEL, Path(scratch) / MODEL, vocab_size=260))
        config = settings(folder)
        ttl_s = config.membership.ttl_s
        with Deployment(config) as made:
            for parts in CASES:
                times = []
                for _ in range(ROUNDS):
                    until(lambda: waits(made), "somebody waits", 200)
                    times.append(recovery_s(made, parts))
                say("+".join(parts), times, ttl_s)
            after = []
            for _ in range(ROUNDS):
                until(lambda: waits(made), "somebody waits", 200)
                recovery_s(made, ("prefill",))
                after.append(recovery_s(made, ("decode",)))
            say("decode right after prefill", after, ttl_s)
            for (part,) in ALONE if not SMOKE else ALONE[:1]:
                until(lambda: waits(made), "somebody waits", 200)
                say(f"{part} stopped", [recovery_s(made, (part,), signal.SIGSTOP)], ttl_s)


if __name__ == "__main__":
    main()
