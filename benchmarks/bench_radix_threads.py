"""How much more do two pinned threads match than one, in C++ alone, without Python and its lock? (goal: 1.6 times)

Builds benchmarks/native/threads_radix.cpp with the core (CMake, once, into build/benchmarks) and prints its lines:
matches a second over all 10,000 prompts of workload.py's kind, which no cache holds, and over 100 of them, which stay
cached; `ratio` is the median over rounds of one thread and two in turn, beside the least and the most.

    python benchmarks/bench_radix_threads.py          (--smoke: 2 s once it is built)
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = "threads_radix"


def built() -> Path:
    """The program, compiled anew where its sources changed."""
    folder = ROOT / "build" / "benchmarks"
    options = ["-DPOOLWEAVE_PYTHON=OFF", "-DPOOLWEAVE_BENCHMARKS=ON", "-DCMAKE_BUILD_TYPE=Release"]
    for command in (
        ["cmake", "-S", ROOT, "-B", folder, *options],
        ["cmake", "--build", folder, "--target", TARGET, "-j2"],
    ):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}")
    return folder / TARGET


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    sizes = (5, 0.02, 3) if given.smoke else (given.conversations, given.seconds, given.rounds)
    subprocess.run([built(), *map(str, sizes)], check=True)


if __name__ == "__main__":
    main()
