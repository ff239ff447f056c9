"""What do locality-aware routing and PD caching buy? MemServe's Fig. 15 and Fig. 8, simulated.

    python benchmarks/bench_policies.py --loogle loogle_longdep_qa.jsonl.xz --png policies.png

Fig. 15: 3 prefill + 1 decode instance, P99 TTFT of each policy over the share that prompts have in common, and on
LooGLE. There 15 of the 129 requests are the first about their document, so that the P99 of the prompt tree is the cold
prefill of a long document at any rate, which no policy avoids. Fig. 8: mean JCT and P99 TTFT of colocated instances
and of the four PD flows over request rates. One JSON line a point; the picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from poolweave.serving.simulator import (
    Flow,
    InstanceGroup,
    Simulation,
    SimulationConfig,
    Trace,
    compare_policies,
    llama2_13b_on_two_h800,
)
from poolweave.serving.simulator.trace_files import load_loogle
from poolweave.serving.simulator.traces import SharedPrefixes
from poolweave.types import Role

CACHE, POLICIES = 140_000, ("prompt_tree", "session", "least_load")


def group(role: Role, count: int) -> InstanceGroup:
    return InstanceGroup(role=role, count=count, cache_tokens=CACHE, kv_tokens=CACHE)


def pairs(prefill: int, decode: int) -> SimulationConfig:
    groups = (group(Role.PREFILL, prefill), group(Role.DECODE, decode))
    return SimulationConfig(device=llama2_13b_on_two_h800(), instances=groups)


def routing(trace: Trace, label: str, x: float) -> Iterator[dict[str, Any]]:
    for policy, report in compare_policies(pairs(3, 1), trace, POLICIES).items():
        yield {
            "figure": "15",
            "workload": label,
            "x": x,
            "series": policy,
            "ttft_p99_s": report.ttft.p99,
            "ttft_p50_s": report.ttft.p50,
            "hit_ratio": report.hit_ratio,
            "balance": report.balance,
        }


def flows(requests: int, rate: float) -> Iterator[dict[str, Any]]:
    trace = SharedPrefixes(share=0.6, num_requests=requests, prompt_tokens=2048, output_tokens=200, turns=5).trace()
    both = replace(pairs(1, 1), instances=(group(Role.COLOCATED, 2),), flow=Flow.PD_BASIC)
    series = {"colocated": both, "colocated-caching": replace(both, flow=Flow.PD_CACHING_3)}
    series |= {flow.value: replace(pairs(1, 1), flow=flow) for flow in Flow}
    for name, config in series.items():
        report = Simulation(config, trace.at_rate(rate)).run()
        yield {
            "figure": "8",
            "workload": "five turns",
            "x": rate,
            "series": name,
            "jct_mean_s": report.jct.mean,
            "ttft_p99_s": report.ttft.p99,
            "tpot_p99_s": report.tpot.p99,
        }


def draw(points: list[dict[str, Any]], path: str) -> None:
    import matplotlib.pyplot as plt

    panels = (("15", "share", "ttft_p99_s"), ("15", "loogle", "ttft_p99_s"), ("8", "five turns", "jct_mean_s"))
    figure, axes = plt.subplots(1, len(panels), figsize=(15, 4))
    for axis, (number, workload, metric) in zip(axes, panels, strict=True):
        shown = [p for p in points if p["figure"] == number and p["workload"] == workload]
        for series in dict.fromkeys(p["series"] for p in shown):
            line = [(p["x"], p[metric]) for p in shown if p["series"] == series]
            axis.plot(*zip(*line, strict=True), marker="o", label=series)
        axis.set(title=f"Fig. {number}: {workload}", xlabel="share" if workload == "share" else "requests/s")
        axis.set(ylabel=metric, yscale="log")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loogle", help="the LooGLE file")
    parser.add_argument("--png", help="where to draw the curves")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    requests = 60 if arguments.smoke else 600
    points: list[dict[str, Any]] = []

    def keep(found: Iterator[dict[str, Any]]) -> None:
        for point in found:
            points.append(point)
            print(json.dumps(point), flush=True)

    for share in (0.5,) if arguments.smoke else (0.0, 0.1, 0.25, 0.5, 0.75, 0.9):
        trace = SharedPrefixes(share=share, num_requests=requests, prefixes=48).trace()
        keep(routing(trace.at_rate(22.0), "share", share))
    if arguments.loogle:
        trace = load_loogle(Path(arguments.loogle), copies=3)
        for rate in (1.0, 2.0, 4.0, 8.0):
            keep(routing(trace.at_rate(rate), "loogle", rate))
    for rate in (4.0,) if arguments.smoke else (2.0, 4.0, 8.0, 12.0, 16.0):
        keep(flows(requests // 2, rate))
    if arguments.png:
        draw(points, arguments.png)


if __name__ == "__main__":
    main()
