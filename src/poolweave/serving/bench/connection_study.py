"""What one more connected peer costs a process: memory, descriptors, threads."""

from __future__ import annotations

from collections.abc import Iterator

from poolweave.serving.bench.config import StudyConfig
from poolweave.serving.bench.peer import Peer, PoolSpec
from poolweave.serving.bench.points import ConnectionPoint

_WARM_UP = 2  # peers before the count begins: what is made once is not a connection's


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
    """Counted in a process of its own: memory that others freed in one would hide what connections take."""
    with Peer() as counted:
        itself = counted.open(spec)

        def connect(count: int) -> None:
            others = peer.open(*[spec] * count)
            if direction == "receiving":
                peer.send_to(itself)
            else:
                counted.send_to(others)

        connect(_WARM_UP)
        before = counted.usage()
        connect(_WARM_UP + config.peers)
        after = counted.usage()
    return ConnectionPoint(
        transport=spec.transport, direction=direction, peers=config.peers,
        kib_each=max(0.0, after.kib - before.kib) / config.peers,
        descriptors_each=(after.descriptors - before.descriptors) / config.peers,
        threads_each=(after.threads - before.threads) / config.peers,
    )  # fmt: skip
