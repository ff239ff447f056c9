"""Mooncake's transfer engine over TCP between two processes: `PYTHON mooncake_tcp.py COUNT PIECE_BYTES REPEATS`.

Reads COUNT pieces from random places of the other process to random places here; prints the seconds of each round.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import numpy as np
from mooncake.engine import TransferEngine


def open_engine(size: int, value: int) -> tuple[TransferEngine, np.ndarray]:
    memory = np.full(size, value, np.uint8)
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(memory.ctypes.data, size) == 0
    return engine, memory


def main(count: int, piece: int, repeats: int) -> None:
    command = [sys.executable, __file__, str(count), str(piece), str(repeats), "--serve"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    engine, memory = open_engine(count * piece, 0)
    port, base = next(json.loads(line[1:]) for line in child.stdout if line.startswith("#"))
    rng = np.random.default_rng(0)
    here, there = (rng.permutation(count).astype(np.int64) * piece for _ in range(2))
    arguments = (here + memory.ctypes.data).tolist(), (there + base).tolist(), [piece] * count
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        assert engine.batch_transfer_sync_read(f"127.0.0.1:{port}", *arguments) == 0
        seconds.append(time.perf_counter() - start)
    assert (memory == 3).all()
    print(json.dumps({"seconds": seconds[1:]}), flush=True)
    child.kill()
    os._exit(0)  # its threads do not end


if __name__ == "__main__":
    sizes = [int(one) for one in sys.argv[1:4]]
    if "--serve" in sys.argv:
        engine, memory = open_engine(sizes[0] * sizes[1], 3)
        print("#" + json.dumps([engine.get_rpc_port(), memory.ctypes.data]), flush=True)
        sys.stdin.read()
        os._exit(0)
    main(*sizes)
