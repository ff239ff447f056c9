"""What do small pieces cost: a 4 KiB pull over TCP, and the plan of 10,240 descriptors?

The pull against a raw socket in the same two processes (40 bytes there, 4 KiB back; Python at both ends), in turn; the
plan as the runs of 128 layered blocks of Llama-2-13B, made from places. `python benchmarks/bench_transfer_small.py
[--smoke]`; one JSON line a figure.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from poolweave.transfer._native import Abort, Extents, Grid, Outcome, Pull, StreamServer, Tiers, Wire, pull_blocks

COUNT = 50 if "--smoke" in sys.argv else 2000
NBYTES, REQUEST_BYTES = 4096, 40


def memory(array: np.ndarray[tuple[int], np.dtype[np.uint8]], blocks: int, planes: int, plane_bytes: int) -> Extents:
    grid = Grid(
        base=array.ctypes.data, nbytes=blocks * planes * plane_bytes, slot_stride=plane_bytes,
        plane_stride=blocks * plane_bytes, row_stride=plane_bytes, row_bytes=plane_bytes,
        num_slots=blocks, num_planes=planes, num_rows=1,
    )  # fmt: skip
    tiers = Tiers([1], [grid])
    slots = np.random.default_rng(0).permutation(blocks).astype(np.int32)
    return tiers.extents(np.ones(blocks, np.uint8), slots)


def serve(port: str) -> None:
    array = np.full(NBYTES, 7, np.uint8)
    server = StreamServer(60.0, 60.0)
    server.publish(1, 2, memory(array, 1, 1, NBYTES), 600.0)
    data = socket.create_connection(("127.0.0.1", int(port)))
    server.adopt(data.detach())
    raw = socket.create_connection(("127.0.0.1", int(port)))
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    answer = array.tobytes()
    while raw.recv(REQUEST_BYTES):
        raw.sendall(answer)
    server.close()


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def pull_and_raw() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    child = subprocess.Popen([sys.executable, __file__, "--serve", str(listener.getsockname()[1])])
    wire = Wire(listener.accept()[0].detach())
    raw = listener.accept()[0]
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    array = np.zeros(NBYTES, np.uint8)
    target, ask, abort = (
        memory(array, 1, 1, NBYTES),
        Pull(offer=1, nonce=2, first_block=0, chunk_bytes=1 << 20),
        Abort(),
    )
    request, buffer = bytes(REQUEST_BYTES), memoryview(bytearray(NBYTES))

    def pull() -> None:
        assert pull_blocks([wire], ask, target, 5.0, 5.0, abort) == Outcome.DONE

    def ping() -> None:
        raw.sendall(request)
        got = 0
        while got < NBYTES:
            got += raw.recv_into(buffer[got:])

    pulls, pings = [], []
    for _ in range(COUNT):
        pings.append(seconds(ping))
        pulls.append(seconds(pull))
    assert (array == 7).all()
    raw.close()
    child.wait(30)
    mine, raw_s = statistics.median(pulls), statistics.median(pings)
    point = {"bench": "transfer_small", "what": "4 KiB over tcp", "us": round(mine * 1e6, 1),
             "raw_us": round(raw_s * 1e6, 1), "of_raw": round(mine / raw_s, 2)}  # fmt: skip
    print(json.dumps(point), flush=True)


def plan() -> None:
    blocks, planes, plane_bytes = 128, 80, 160 << 10
    anchor = np.zeros(1, np.uint8)  # nothing is read
    times = sorted(seconds(lambda: memory(anchor, blocks, planes, plane_bytes)) for _ in range(COUNT // 10))
    runs = memory(anchor, blocks, planes, plane_bytes).num_runs
    point = {
        "bench": "transfer_small",
        "what": "plan",
        "descriptors": runs,
        "us": round(times[len(times) // 2] * 1e6, 1),
    }
    print(json.dumps(point), flush=True)


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve(sys.argv[2])
    else:
        pull_and_raw()
        plan()
