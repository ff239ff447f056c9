"""How fast do blocks move between two processes, against the limits of the machine in the same run?

MemServe Fig. 11: discrete against aggregated blocks. a: 128 blocks of Llama-2-13B as 10,240 small ones of 160 KiB;
b: as 128 of 12.5 MiB; c: one block of 1.56 GiB. All at random places, destination resident, mapping populated unless
"cold". In turn: the limit (shm: memcpy with as many threads; tcp: the best raw-socket program with as many
connections), checksums off, checksums on, and "fresh": on, the sender's checksums made within the transfer too, which
sealed blocks need once. `python benchmarks/bench_transfer_speed.py [--smoke] [--off] [shm|tcp] [a|b|c ...] [1|2]`;
`--off`: the limit and checksums off alone. One JSON line a point.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from transfer_yardsticks import Memcpy, RawSockets, timed

from poolweave.mempool import Blocks, MemPool, PoolConfig
from poolweave.transfer import KVLayout, TransferConfig
from poolweave.types import Tier

SMOKE = "--smoke" in sys.argv
OFF = "--off" in sys.argv
SCALE = 64 if SMOKE else 1
REPEATS = 1 if SMOKE else 5
BLOCKS = 128 // SCALE


def layout_of(mode: str) -> KVLayout:
    shape: dict[str, Any] = {"num_layers": 40, "kv_heads": 40, "head_dim": 128, "dtype": "float16"}
    if mode == "c":
        return KVLayout(**shape, block_tokens=16 * BLOCKS, order="aggregated")
    return KVLayout(**shape, block_tokens=16, order="layered" if mode == "a" else "aggregated")


def count_of(mode: str) -> int:
    return 1 if mode == "c" else BLOCKS


def open_pool(name: str, mode: str, transport: str, threads: int, *, checksums: bool = True) -> MemPool:
    layout = layout_of(mode)
    config = TransferConfig(listen=transport, checksums=checksums, copy_threads=threads, connections=threads)
    size = count_of(mode) * layout.block_bytes
    return MemPool(layout, instance=f"{name}-{mode}-{os.getpid()}", hbm=size, config=PoolConfig(transfer=config))


def serve(mode: str, transport: str, threads: str) -> None:
    """The receiver: takes each transfer and drops it."""
    with open_pool("receiver", mode, transport, int(threads)) as pool:
        blocks = pool.alloc(count_of(mode))
        pool.view(Tier.HBM)[pool.slots(blocks)] = 0  # resident
        pool.free(blocks)
        print(pool.instance, pool.address, flush=True)
        for line in sys.stdin:
            pool.receive(line.strip().encode(), 60).close()
            print("ok", flush=True)


class Receiver:
    """The other process."""

    def __init__(self, mode: str, transport: str, threads: int) -> None:
        flags = ["--smoke"] if SMOKE else []
        command = [sys.executable, __file__, "--serve", mode, transport, str(threads), *flags]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._tags = 0
        self.name, self.address = self._line().split()

    def _line(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()

    def take(self, pool: MemPool, blocks: Blocks) -> float:
        """Seconds of one transfer of `blocks`, offer to confirm."""
        assert self._child.stdin is not None
        self._tags += 1
        self._child.stdin.write(f"{self._tags}\n")
        self._child.stdin.flush()
        seconds = timed(lambda: pool.transfer(self.name, blocks, tag=b"%d" % self._tags).result(120))
        self._line()
        return seconds

    def close(self) -> None:
        self._child.communicate(timeout=30)


class Source:
    """The sender's pool, full of sealed blocks at random places."""

    def __init__(self, mode: str, transport: str, threads: int, *, checksums: bool) -> None:
        self.pool = open_pool("checked" if checksums else "plain", mode, transport, threads, checksums=checksums)
        self._count = count_of(mode)
        self.pool.view(Tier.HBM)[self.pool.slots(self._seal())] = 3

    def _seal(self) -> Blocks:
        blocks = self.pool.alloc(self._count)
        self.pool.seal(blocks)
        self.blocks = Blocks.of(np.random.default_rng(1).permutation(blocks.array))
        return self.blocks

    def renew(self) -> None:
        """The same memory as new blocks, whose checksums nobody knows."""
        self.pool.free(self.blocks)
        self._seal()


def ratios(of: Sequence[float], to: Sequence[float]) -> dict[str, float]:
    """Round by round: how much of the speed of `to` is left; the first round is cold."""
    each = sorted(b / a for a, b in zip(of[1:], to[1:], strict=True))
    return {"median": round(statistics.median(each), 3), "worst": round(each[0], 3), "best": round(each[-1], 3)}


def measure(mode: str, transport: str, threads: int) -> None:
    layout = layout_of(mode)
    piece, count = (
        (layout.plane_bytes, BLOCKS * layout.num_planes) if mode == "a" else (layout.block_bytes, count_of(mode))
    )
    limit = Memcpy(count, piece, threads) if transport == "shm" else RawSockets(count, piece, threads)
    receiver = Receiver(mode, transport, threads)
    plain, *checked = (Source(mode, transport, threads, checksums=one) for one in ((False,) if OFF else (False, True)))
    for source in (plain, *checked):
        source.pool.connect(receiver.name, receiver.address)
    seconds: dict[str, list[float]] = {"limit": [], "off": []}
    for _ in range(REPEATS + 1):
        seconds["limit"].append(limit.seconds())
        seconds["off"].append(receiver.take(plain.pool, plain.blocks))
        for source in checked:
            source.renew()
            for name in ("fresh", "on"):
                seconds.setdefault(name, []).append(receiver.take(source.pool, source.blocks))
    closing = [one.pool for one in (plain, *checked)], [limit] if isinstance(limit, RawSockets) else []
    for one in itertools.chain(*closing, [receiver]):
        one.close()
    nbytes = count_of(mode) * layout.block_bytes
    point = {
        "bench": "transfer_speed", "mode": mode, "transport": transport, "threads": threads,
        "gb_per_s": {name: round(nbytes / statistics.median(all_[1:]) / 1e9, 3) for name, all_ in seconds.items()},
        "cold_gb_per_s": round(nbytes / seconds["off"][0] / 1e9, 3),
        "of_limit": ratios(seconds["off"], seconds["limit"]),
        **{f"{name}_of_off": ratios(seconds[name], seconds["off"]) for name in ("on", "fresh") if name in seconds},
    }  # fmt: skip
    print(json.dumps(point), flush=True)


def main() -> None:
    def asked(*options: str) -> list[str]:
        return [one for one in options if one in sys.argv[1:]] or list(options)

    for transport in asked("shm", "tcp"):
        for mode in asked("a", "b", "c"):
            for threads in asked("1", "2"):
                measure(mode, transport, int(threads))


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve(*sys.argv[2:5])
    else:
        main()
