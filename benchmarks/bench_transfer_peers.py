"""Our TCP beside Mooncake's engine and NIXL over TCP and the best raw-socket program, in one run, one connection each.

a: 128 blocks of Llama-2-13B as 10,240 pieces of 160 KiB, b: as 128 of 12.5 MiB, c: as one of 1.56 GiB; checksums off,
memory resident.
`python benchmarks/bench_transfer_peers.py [--smoke] [--peers DIR] [a|b|c ...]`: DIR holds `mooncake` and `nixl`, each a
virtual environment with that package; one that is not there is reported as "not installed". One JSON line a mode.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

import bench_transfer_speed as speed
from transfer_yardsticks import RawSockets

PEERS = {"mooncake": "mooncake_tcp.py", "nixl": "nixl_tcp.py"}
# TCP alone; as it comes, Mooncake fails 10,240 pieces with "queue full".
SETTINGS = {
    "UCX_TLS": "tcp", "MC_FORCE_TCP": "1", "GLOG_minloglevel": "2", "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16384",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "16384",
}  # fmt: skip


def ours(mode: str, repeats: int) -> list[float]:
    receiver = speed.Receiver(mode, "tcp", 1)
    source = speed.Source(mode, "tcp", 1, checksums=False)
    source.pool.connect(receiver.name, receiver.address)
    seconds = [receiver.take(source.pool, source.blocks) for _ in range(repeats + 1)]
    source.pool.close()
    receiver.close()
    return seconds[1:]


def raw(count: int, piece: int, repeats: int) -> list[float]:
    sockets = RawSockets(count, piece, 1)
    seconds = [sockets.seconds() for _ in range(repeats)]
    sockets.close()
    return seconds


def theirs(python: Path, script: str, sizes: Sequence[int]) -> list[float]:
    command = [str(python), str(Path(__file__).parent / "peers" / script), *map(str, sizes)]
    env = {**os.environ, **SETTINGS}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=env)
    (line,) = (one for one in done.stdout.splitlines() if one.startswith('{"seconds"'))
    return list(json.loads(line)["seconds"])


def measure(mode: str, peers: Path | None, repeats: int) -> None:
    layout = speed.layout_of(mode)
    blocks = speed.count_of(mode)
    pieces = (blocks * layout.num_planes, layout.plane_bytes) if mode == "a" else (blocks, layout.block_bytes)
    seconds = {"ours": ours(mode, repeats), "raw": raw(*pieces, repeats)}
    point: dict[str, object] = {"bench": "transfer_peers", "mode": mode, "pieces": pieces[0]}
    for name, script in PEERS.items():
        python = peers / name / "bin/python" if peers is not None else None
        if python is None or not python.exists():
            point[name] = "not installed"
        else:
            seconds[name] = theirs(python, script, [*pieces, repeats])
    nbytes, mine = pieces[0] * pieces[1], statistics.median(seconds["ours"])
    for name, one in seconds.items():
        point[f"{name}_gb_per_s"] = round(nbytes / statistics.median(one) / 1e9, 3)
        if name != "ours":
            point[f"of_{name}"] = round(statistics.median(one) / mine, 3)
    print(json.dumps(point), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("modes", nargs="*", default=[*"abc"])
    arguments = parser.parse_args()
    for mode in arguments.modes:
        measure(mode, arguments.peers, 1 if arguments.smoke else 3)


if __name__ == "__main__":
    main()
