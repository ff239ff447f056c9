"""Which eviction policy keeps what is asked for again? Hit ratio of each, on recorded traces.

    python benchmarks/bench_eviction.py --trace mooncake=PATH sharegpt=PATH ... [--capacity 0.05 0.2] [--smoke]

A trace's requests go through an index in order of arrival: look up the prompt, then store prompt and answer; above
`capacity` (a share of the trace's distinct blocks) blocks are evicted. Hit ratio: blocks found of those looked up.
`of_lru` is the ratio to LRU's, `of_best` to what a cache without limits would find. Without --trace those that lie in
POOLWEAVE_DATA or ../shared/data are taken. One JSON line a point, with the time of an eviction in us a block.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from poolweave.index import EVICTION_POLICIES, RadixIndex
from poolweave.serving.simulator import Trace
from poolweave.serving.simulator.trace_files import load_trace
from poolweave.serving.simulator.traces import SharedPrefixes


def replay(trace: Trace, policy: str, capacity: int) -> dict[str, Any]:
    """Hit ratio and cost of one policy."""
    index = RadixIndex(2, eviction=policy)  # a block's key is two tokens
    asked = hit = evicted = 0
    spent = 0.0
    payloads = np.zeros(max(len(request.answer_keys) for request in trace.requests), np.uint64)
    for request in trace.requests:
        asked += len(request.keys)
        hit += index.match(request.cache_tokens[: 2 * len(request.keys)]).num_tokens // 2
        index.insert(request.cache_tokens, payloads[: len(request.answer_keys)])
        if len(index) > capacity:
            started = time.perf_counter()
            evicted += len(index.evict(len(index) - capacity))
            spent += time.perf_counter() - started
    return {"hit_ratio": hit / asked, "evicted": evicted, "us_a_block": 1e6 * spent / max(evicted, 1)}


def compare(trace: Trace, shares: list[float]) -> Iterator[dict[str, Any]]:
    distinct = len({int(key) for request in trace.requests for key in request.answer_keys})
    best = replay(trace, "lru", distinct)["hit_ratio"]
    for share in shares:
        lru = 0.0
        for policy in EVICTION_POLICIES:
            point = replay(trace, policy, max(1, int(distinct * share)))
            lru = lru or point["hit_ratio"]
            yield {
                "trace": trace.name,
                "capacity": share,
                "blocks": int(distinct * share),
                "policy": policy,
                **{name: round(value, 4) for name, value in point.items()},
                "of_lru": round(point["hit_ratio"] / lru, 3) if lru else None,
                "of_best": round(point["hit_ratio"] / best, 3) if best else None,
            }


def traces(named: list[str], smoke: bool) -> Iterator[Trace]:
    if not named:
        yield SharedPrefixes(share=0.5, num_requests=60 if smoke else 3000, prompt_tokens=256).trace()
    for kind, path in [entry.split("=", 1) for entry in named]:
        yield load_trace(kind, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", nargs="*", default=[], metavar="KIND=PATH")
    parser.add_argument("--capacity", nargs="*", type=float, default=[0.05, 0.2])
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    for trace in traces(given.trace, given.smoke):
        for point in compare(trace, given.capacity):
            print(json.dumps(point))


if __name__ == "__main__":
    main()
