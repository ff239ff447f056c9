"""Transfers over the nixl transport against NIXL's own API on the same bytes, in turn, in the same two processes.

a: 32 blocks of Llama-2-13B as 2,560 runs of 160 KiB, b: as 32 of 12.5 MiB, c: as one of 400 MiB; destination resident,
checksums off. NIXL's own: descriptors, READ, wait, release. Needs the package nixl.
`python benchmarks/bench_transfer_nixl.py [--smoke]`; one JSON line a mode.
"""

from __future__ import annotations

import base64
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from poolweave.errors import ConfigError
from poolweave.mempool import Blocks, MemPool, PoolConfig
from poolweave.transfer import KVLayout, TransferConfig
from poolweave.transfer.transports.nixl import load_nixl

SMOKE = "--smoke" in sys.argv
BLOCKS = 8 if SMOKE else 32
REPEATS = 2 if SMOKE else 9


def count_of(mode: str) -> int:
    return 1 if mode == "c" else BLOCKS


def open_pool(name: str, mode: str) -> MemPool:
    order: Any = "layered" if mode == "a" else "aggregated"
    tokens = 16 * BLOCKS // count_of(mode)
    layout = KVLayout(num_layers=40, kv_heads=40, head_dim=128, dtype="float16", block_tokens=tokens, order=order)
    size = count_of(mode) * layout.block_bytes
    config = PoolConfig(max_hbm=size, transfer=TransferConfig(listen="nixl", checksums=False))
    return MemPool(layout, instance=f"{name}-{mode}", hbm=size, config=config)


class OwnApi:
    """A NIXL agent of its own over a pool's memory, as a user of NIXL would make it."""

    def __init__(self, name: str, pool: MemPool) -> None:
        api = load_nixl()
        self.agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
        view = pool.view()
        self.base = view.ctypes.data
        self.registered = self.agent.register_memory([(self.base, view.nbytes, 0, "")], "DRAM")

    def places(self, pool: MemPool, slots: list[int]) -> list[tuple[int, int, int]]:
        layout = pool.layout
        if layout.order == "aggregated":
            return [(self.base + slot * layout.block_bytes, layout.block_bytes, 0) for slot in slots]
        plane = len(slots) * layout.plane_bytes
        return [
            (self.base + p * plane + slot * layout.plane_bytes, layout.plane_bytes, 0)
            for slot in slots
            for p in range(layout.num_planes)
        ]

    def read(self, peer: Any, here: Any, there: Any) -> float:
        start = time.perf_counter()
        agent = self.agent
        descs = agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM")
        handle = agent.initialize_xfer("READ", *descs, peer, b"")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state
        agent.release_xfer_handle(handle)
        return time.perf_counter() - start


def say(**line: Any) -> None:
    print(f"#{json.dumps(line)}", flush=True)  # NIXL logs to the same stream


def serve(mode: str) -> None:
    """The sender: offers its blocks each time it is asked to."""
    with open_pool("sender", mode) as pool:
        blocks = pool.alloc(count_of(mode))
        pool.view()[pool.slots(blocks)] = 3
        pool.seal(blocks)
        own = OwnApi(f"own-sender-{mode}", pool)
        order = np.random.default_rng(1).permutation(blocks.array)
        there = own.places(pool, pool.slots(Blocks.of(order)).tolist())
        say(metadata=base64.b64encode(own.agent.get_agent_metadata()).decode(), there=there)
        pool.connect(f"receiver-{mode}", sys.stdin.readline().strip())
        for line in sys.stdin:
            start = time.perf_counter()
            pool.transfer(f"receiver-{mode}", order, tag=line.strip().encode()).result(120)
            say(seconds=time.perf_counter() - start)


def measure(mode: str) -> None:
    command = [sys.executable, __file__, "--serve", mode, *sys.argv[1:]]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    stdin, lines = child.stdin, (json.loads(line[1:]) for line in child.stdout if line.startswith("#"))

    def tell(text: str) -> Any:
        stdin.write(text + "\n")
        stdin.flush()

    with open_pool("receiver", mode) as pool:
        blocks = pool.alloc(count_of(mode))
        pool.view()[pool.slots(blocks)] = 0  # resident
        pool.free(blocks)
        own = OwnApi(f"own-receiver-{mode}", pool)
        hello = next(lines)
        peer = own.agent.add_remote_agent(base64.b64decode(hello["metadata"]))
        here = np.array(own.places(pool, list(range(count_of(mode)))), np.uint64)
        there = np.array(hello["there"], np.uint64)
        tell(pool.address)
        ours, theirs = [], []
        for i in range(REPEATS + 1):
            theirs.append(own.read(peer, here, there))
            tell(f"{i}")
            ours.append(next(lines)["seconds"])
            with pool.receive(b"%d" % i, 60) as got:
                assert (pool.view()[pool.slots(got.blocks)] == 3).all()
        child.stdin.close()
        child.wait(30)
    nbytes = count_of(mode) * pool.layout.block_bytes
    ratios = sorted(t / o for t, o in zip(theirs[1:], ours[1:], strict=True))
    point = {
        "bench": "transfer_nixl", "mode": mode, "gb_per_s": round(nbytes / statistics.median(ours[1:]) / 1e9, 3),
        "nixl_gb_per_s": round(nbytes / statistics.median(theirs[1:]) / 1e9, 3),
        "of_nixl": round(statistics.median(ratios), 3), "worst": round(ratios[0], 3), "best": round(ratios[-1], 3),
    }  # fmt: skip
    print(json.dumps(point), flush=True)


def main() -> None:
    try:
        load_nixl()
    except ConfigError as error:
        print(json.dumps({"bench": "transfer_nixl", "skipped": str(error)}))
        return
    for mode in "abc":
        measure(mode)


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve(sys.argv[2])
    else:
        main()
