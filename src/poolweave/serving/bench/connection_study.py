"""What one more connected peer costs a process: memory, descriptors, threads."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from poolweave.serving.bench.config import StudyConfig
from poolweave.serving.bench.peer import Peer, PoolSpec
from poolweave.serving.bench.points import ConnectionPoint

_TIMEOUT_S = 60.0
_WARM_UP = 2  # peers before the count begins: what is made once is not a connection's


@dataclass(frozen=True, slots=True)
class _Usage:
    kib: float
    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> _Usage:
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            resident * os.sysconf("SC_PAGE_SIZE") / 1024,
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
        )


def count(config: StudyConfig) -> int:
    """How many points there will be."""
    return 2 * len(config.transports)


def measure(config: StudyConfig, peer: Peer) -> Iterator[ConnectionPoint]:
    """Tiny blocks: what is counted is the connection, not the KV."""
    for transport in config.transports:
        spec = PoolSpec(
            layers=2, kv_heads=1, head_dim=8, block_tokens=16, dtype="float16", order="aggregated", num_blocks=8,
            transport=transport, connections=1, checksums=True,
        )  # fmt: skip
        for direction in ("receiving", "sending"):
            yield _one(config, peer, spec, direction)


def _one(config: StudyConfig, peer: Peer, spec: PoolSpec, direction: str) -> ConnectionPoint:
    with spec.open() as pool:
        pool.view()[:] = 0
        blocks = pool.alloc(1)
        pool.seal(blocks)

        def connect(count: int) -> None:
            others = peer.open(spec, count)
            if direction == "receiving":
                peer.send_to(pool.instance, pool.address)
                return
            for instance, address in others:
                pool.connect(instance, address)
                pool.transfer(instance, blocks, tag=b"").result(_TIMEOUT_S)

        connect(_WARM_UP)
        before = _Usage.now()
        connect(_WARM_UP + config.peers)
        after = _Usage.now()
        pool.free(blocks)
    return ConnectionPoint(
        transport=spec.transport, direction=direction, peers=config.peers,
        kib_each=max(0.0, after.kib - before.kib) / config.peers,
        descriptors_each=(after.descriptors - before.descriptors) / config.peers,
        threads_each=(after.threads - before.threads) / config.peers,
    )  # fmt: skip
