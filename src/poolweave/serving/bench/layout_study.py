"""Discrete against aggregated blocks: how long a prompt's KV takes, and in how many calls. Source: MemServe Fig. 11."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from poolweave.mempool import MemPool
from poolweave.serving.bench.config import StudyConfig
from poolweave.serving.bench.peer import Peer, PoolSpec
from poolweave.serving.bench.points import LayoutPoint
from poolweave.transfer import TransferReport
from poolweave.transfer.layout import Order
from poolweave.types import UInt64Array

ORDERS: dict[str, Order] = {"discrete": "layered", "aggregated": "aggregated"}
_TIMEOUT_S = 120.0


def count(config: StudyConfig) -> int:
    """How many points there will be."""
    return len(config.transports) * len(config.connections) * len(ORDERS) * len(config.tokens)


def measure(config: StudyConfig, peer: Peer) -> Iterator[LayoutPoint]:
    """The blocks lie at every second place, so that none can be merged with its neighbour.

    Both kinds of blocks are sent in turn, so that what else runs on the machine meets both alike.
    """
    most = config.model.layout("aggregated").num_blocks(max(config.tokens))
    for transport in config.transports:
        for connections in config.connections:
            here, there = (
                [spec_of(config, order, transport, connections, num_blocks) for order in ORDERS.values()]
                for num_blocks in (2 * most, most)
            )
            with ExitStack() as stack:
                lanes = []
                for blocks, spec, (instance, address) in zip(ORDERS, here, peer.open(*there), strict=True):
                    pool = stack.enter_context(spec.open())
                    pool.view()[:] = 1
                    pool.connect(instance, address)
                    lanes.append(_Lane(blocks, pool, instance))
                for tokens in config.tokens:
                    yield from _size(config, lanes, transport, connections, tokens)


def spec_of(config: StudyConfig, order: Order, transport: str, connections: int, num_blocks: int) -> PoolSpec:
    model = config.model
    return PoolSpec(
        layers=model.layers, kv_heads=model.kv_heads, head_dim=model.head_dim, block_tokens=model.block_tokens,
        dtype=model.dtype, order=order, num_blocks=num_blocks, transport=transport, connections=connections,
        checksums=config.checksums,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Lane:
    """One kind of blocks on its way to the peer's pool of that kind."""

    blocks: str
    pool: MemPool
    peer: str

    def send(self, chosen: UInt64Array) -> tuple[float, TransferReport]:
        """Seconds from offer to confirm."""
        began = time.perf_counter()
        report = self.pool.transfer(self.peer, chosen, tag=b"").result(_TIMEOUT_S)
        return time.perf_counter() - began, report


def _size(
    config: StudyConfig, lanes: Sequence[_Lane], transport: str, connections: int, tokens: int
) -> Iterator[LayoutPoint]:
    handles = [lane.pool.alloc(2 * lane.pool.layout.num_blocks(tokens)) for lane in lanes]
    chosen = [one.array[::2] for one in handles]
    for lane, blocks in zip(lanes, chosen, strict=True):
        lane.pool.seal(blocks)
        lane.send(blocks)  # it dials, and makes the checksums that the others reuse
    rounds = [[lane.send(blocks) for lane, blocks in zip(lanes, chosen, strict=True)] for _ in range(config.repeats)]
    for index, (lane, held) in enumerate(zip(lanes, handles, strict=True)):
        lane.pool.free(held)
        seconds = [one[index][0] for one in rounds]
        layout = lane.pool.layout
        yield LayoutPoint(
            transport=transport, blocks=lane.blocks, connections=connections, tokens=tokens,
            nbytes=rounds[0][index][1].nbytes, calls=len(chosen[index]) * layout.runs(layout.num_layers),
            median_s=statistics.median(seconds), worst_s=max(seconds),
            gain=statistics.median(one[0][0] / one[index][0] for one in rounds) if index else None,
        )  # fmt: skip
