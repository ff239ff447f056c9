"""NIXL's own API over TCP between two processes: `PYTHON nixl_tcp.py COUNT PIECE_BYTES REPEATS`.

Reads COUNT pieces from random places of the other process to random places here; prints the seconds of each round.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np


def open_agent(name: str, size: int, value: int) -> tuple[Any, np.ndarray]:
    for package in ("nixl._api", "nixl_cu12._api", "nixl_cu13._api"):
        try:
            api = importlib.import_module(package)
            break
        except ImportError:
            continue
    memory = np.full(size, value, np.uint8)
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
    agent.register_memory([(memory.ctypes.data, size, 0, "")], "DRAM")
    return agent, memory


def main(count: int, piece: int, repeats: int) -> None:
    command = [sys.executable, __file__, str(count), str(piece), str(repeats), "--serve"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    agent, memory = open_agent("reader", count * piece, 0)
    metadata, base = next(json.loads(line[1:]) for line in child.stdout if line.startswith("#"))
    peer = agent.add_remote_agent(base64.b64decode(metadata))
    rng, zeros = np.random.default_rng(0), np.zeros(count, np.int64)
    sizes = np.full(count, piece, np.int64)
    here, there = (
        agent.get_xfer_descs(
            np.stack([rng.permutation(count).astype(np.int64) * piece + at, sizes, zeros], 1).astype(np.uint64), "DRAM"
        )
        for at in (memory.ctypes.data, base)
    )
    handle = agent.initialize_xfer("READ", here, there, peer, b"")
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state
        seconds.append(time.perf_counter() - start)
    assert (memory == 3).all()
    print(json.dumps({"seconds": seconds[1:]}), flush=True)
    child.kill()
    os._exit(0)  # its libraries crash when they are torn down


if __name__ == "__main__":
    sizes = [int(one) for one in sys.argv[1:4]]
    if "--serve" in sys.argv:
        agent, memory = open_agent("server", sizes[0] * sizes[1], 3)
        print("#" + json.dumps([base64.b64encode(agent.get_agent_metadata()).decode(), memory.ctypes.data]), flush=True)
        sys.stdin.read()
        os._exit(0)
    main(*sizes)
