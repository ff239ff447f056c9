"""Discrete against aggregated blocks: how long a prompt's KV takes, and in how many calls. Source: MemServe Fig. 11."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from poolweave.mempool import MemPool
from poolweave.serving.bench.config import StudyConfig
from poolweave.serving.bench.peer import Peer, PoolSpec
from poolweave.serving.bench.points import LayoutPoint
from poolweave.transfer.layout import Order

ORDERS: dict[str, Order] = {"discrete": "layered", "aggregated": "aggregated"}
_TIMEOUT_S = 120.0


def count(config: StudyConfig) -> int:
    """How many points there will be."""
    return len(config.transports) * len(config.connections) * len(ORDERS) * len(config.tokens)


def measure(config: StudyConfig, peer: Peer) -> Iterator[LayoutPoint]:
    """The blocks lie at every second place, so that none can be merged with its neighbour."""
    most = config.model.layout("aggregated").num_blocks(max(config.tokens))
    for transport in config.transports:
        for connections in config.connections:
            for blocks, order in ORDERS.items():
                spec = spec_of(config, order, transport, connections, 2 * most)
                ((instance, address),) = peer.open(spec)
                with spec.open() as pool:
                    pool.view()[:] = 1
                    pool.connect(instance, address)
                    yield from _sizes(config, pool, instance, transport, connections, blocks)


def spec_of(config: StudyConfig, order: Order, transport: str, connections: int, num_blocks: int) -> PoolSpec:
    model = config.model
    return PoolSpec(
        layers=model.layers, kv_heads=model.kv_heads, head_dim=model.head_dim, block_tokens=model.block_tokens,
        dtype=model.dtype, order=order, num_blocks=num_blocks, transport=transport, connections=connections,
        checksums=config.checksums,
    )  # fmt: skip


def _sizes(
    config: StudyConfig, pool: MemPool, instance: str, transport: str, connections: int, blocks: str
) -> Iterator[LayoutPoint]:
    for tokens in config.tokens:
        handles = pool.alloc(2 * pool.layout.num_blocks(tokens))
        chosen = handles.array[::2]
        pool.seal(chosen)
        seconds = []
        for _ in range(config.repeats + 1):
            began = time.perf_counter()
            report = pool.transfer(instance, chosen, tag=b"").result(_TIMEOUT_S)
            seconds.append(time.perf_counter() - began)
        pool.free(handles)
        del seconds[0]  # it dials, and makes the checksums that the others reuse
        yield LayoutPoint(
            transport=transport, blocks=blocks, connections=connections, tokens=tokens, nbytes=report.nbytes,
            calls=len(chosen) * pool.layout.runs(pool.layout.num_layers), median_s=statistics.median(seconds),
            worst_s=max(seconds),
        )  # fmt: skip
