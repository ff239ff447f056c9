"""How long does `import poolweave` take beyond Python's own start, and beyond numpy's? Aim: the facade < 50 ms.

Fresh processes, interleaved; medians. `python benchmarks/bench_import.py [--smoke]`; one JSON line a point.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

RUNS = 3 if "--smoke" in sys.argv else 21
PROGRAMS = {
    "python": "pass",
    "facade": "import poolweave",
    "numpy": "import numpy",
    "pool": "from poolweave import MemPool",
}


def seconds(program: str) -> float:
    """Wall time of one fresh interpreter that runs `program`."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.perf_counter() - started


def main() -> None:
    taken: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(RUNS):
        for name, program in PROGRAMS.items():
            taken[name].append(seconds(program))
    start = statistics.median(taken["python"])
    for name in ("facade", "numpy", "pool"):
        beyond_ms = 1e3 * (statistics.median(taken[name]) - start)
        print(json.dumps({"metric": f"import_{name}", "unit": "ms beyond python", "p50": round(beyond_ms, 1)}))


if __name__ == "__main__":
    main()
