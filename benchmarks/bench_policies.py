"""What do locality-aware routing and PD caching buy? MemServe's Fig. 15 and Fig. 8, simulated.

    python benchmarks/bench_policies.py --loogle loogle_longdep_qa.jsonl.xz --sharegpt sharegpt_multiturn.jsonl.xz

Fig. 15: 3 prefill + 1 decode instance, policies over the share that prompts have in common: made-up prompts below and
near the load at which session routing queues (22 and 30 requests/s), and LooGLE's documents. Fig. 8: colocated
instances and the four PD flows over request rates, on made-up conversations and on recorded ones. `poolweave simulate
--figure 15` and `8` draw them; here one JSON line a point, then how the first series differs from the others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from poolweave.serving.simulator.comparison import Comparison
from poolweave.serving.simulator.paper_figures import paper_figure
from poolweave.serving.simulator.trace_choice import Workload


def untold(workload: Workload, requests: int) -> Callable[[int], None]:
    return lambda count: None


def figure(number: str, **changes: Any) -> None:
    asked = paper_figure(number)
    found = Comparison.of(asked.question_with(), asked.choice_with(**changes), untold).as_dict()
    for line in found["points"] + found["contrasts"]:
        print(json.dumps({"figure": number, "workload": found["trace"], **line}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loogle", type=Path, help="the LooGLE file")
    parser.add_argument("--sharegpt", type=Path, help="the file of ShareGPT conversations")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if arguments.smoke:
        figure("15", kind="shared", requests=60, shares=(0.5,), rates=(22.0,))
        figure("8", kind="conversations", requests=20, rates=(4.0,))
        return
    figure("15", kind="shared", shares=(0.0, 0.1, 0.25, 0.5, 0.75, 0.9), rates=(22.0, 30.0))
    figure("8", kind="conversations")
    if arguments.loogle:
        figure("15", path=arguments.loogle)
    if arguments.sharegpt:
        figure("8", path=arguments.sharegpt)


if __name__ == "__main__":
    main()
