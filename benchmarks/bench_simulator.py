"""How many requests does the simulator play in a second of one core? Each is routed, queued, prefilled and decoded.

    python benchmarks/bench_simulator.py --trace AzureLLMInferenceTrace_conv.csv.xz

Processor time of the run, 64 colocated instances; made-up prompts without `--trace`. `loop_ns` is what one turn of an
empty Python loop took on the same core just before: divide to compare machines.
"""

from __future__ import annotations

import argparse
import json
import time

from poolweave.serving.simulator import InstanceGroup, Simulation, SimulationConfig, Trace, llama2_13b_on_two_h800
from poolweave.serving.simulator.trace_files import load_trace
from poolweave.serving.simulator.traces import SharedPrefixes
from poolweave.types import Role


def loop_ns() -> float:
    start = time.process_time_ns()
    for _ in range(1_000_000):
        pass
    return (time.process_time_ns() - start) / 1e6


def measure(trace: Trace, instances: int) -> None:
    groups = (InstanceGroup(role=Role.COLOCATED, count=instances, cache_tokens=140_000),)
    simulation = Simulation(SimulationConfig(device=llama2_13b_on_two_h800(), instances=groups), trace)
    turn = loop_ns()
    start = time.process_time()
    report = simulation.run()
    seconds = time.process_time() - start
    point = {
        "metric": f"simulated requests, {trace.name}, {instances} instances",
        "unit": "1/s",
        "value": report.answered / seconds,
        "events_per_s": report.events / seconds,
        "loop_ns": turn,
    }
    print(json.dumps(point))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="a file of Azure's trace")
    parser.add_argument("--rate", type=float, default=300.0, help="requests a second of simulated time")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if arguments.trace:
        trace = load_trace("azure", arguments.trace)
    else:
        trace = SharedPrefixes(share=0.5, num_requests=500 if arguments.smoke else 4000, prompt_tokens=1024).trace()
    for instances in (8,) if arguments.smoke else (8, 64, 512):
        measure(trace.at_rate(arguments.rate * instances / 64), instances)


if __name__ == "__main__":
    main()
