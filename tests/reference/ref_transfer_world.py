"""Engines on reference stores that know each other, for the tests of the transfer room."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from ref_block_store import ReferenceStore

from poolweave._core import Device  # not public
from poolweave.errors import ConfigError
from poolweave.transfer import Exchange, KVLayout, Shipment, TransferConfig, TransferEngine
from poolweave.transfer.transports.nixl import load_nixl

LAYOUT = KVLayout(num_layers=2, kv_heads=2, head_dim=8)
_names = itertools.count()


@dataclass
class Node:
    """An engine and its store."""

    engine: TransferEngine
    store: ReferenceStore

    @property
    def name(self) -> str:
        return self.engine.instance

    def shipment(self, n: int, seed: int = 0, **settings: Any) -> Shipment:
        """`n` full blocks of random KV, freshly made."""
        step = self.store.layout.block_tokens
        return Shipment(blocks=self.store.make(n, seed), num_tokens=n * step, **settings)

    def tokens(self, n: int, seed: int = 0) -> np.ndarray[Any, Any]:
        return np.random.default_rng(seed).integers(0, 1000, n * self.store.layout.block_tokens, dtype=np.int32)


@dataclass
class World:
    """Makes nodes that know each other and closes them all."""

    listen: str
    exchange: Exchange = field(default_factory=Exchange)
    nodes: list[Node] = field(default_factory=list)

    def node(self, *, layout: KVLayout = LAYOUT, num_slots: int = 32, mappable: bool = True, **settings: Any) -> Node:
        settings = {"listen": self.listen, "exchange": self.exchange, "stall_s": 2.0, **settings}
        device = Device.open(0) if settings["listen"] == "nccl" else None
        store = ReferenceStore(layout, num_slots, mappable=mappable, device=device)
        node = Node(TransferEngine(f"node-{os.getpid()}-{next(_names)}", store, TransferConfig(**settings)), store)
        self.nodes.append(node)
        return node

    def pair(self, **settings: Any) -> tuple[Node, Node]:
        a, b = self.node(**settings), self.node(**settings)
        a.engine.connect(b.name, b.engine.address)
        b.engine.connect(a.name, a.engine.address)
        return a, b

    def check(self) -> None:
        for node in self.nodes:
            node.engine.check()
            node.store.check()

    def close(self) -> None:
        for node in self.nodes:
            node.engine.close()
            node.engine.check()
            node.store.check()
            node.store.close()
        self.nodes.clear()


def require_nixl() -> None:
    """Skips the test where the package is not installed."""
    try:
        load_nixl()
    except ConfigError as error:
        pytest.skip(str(error))


def same_kv(a: Node, blocks: Any, b: Node, others: Any) -> bool:
    """True when both lists of blocks hold the same KV."""
    pairs = zip(blocks.tolist(), others.tolist(), strict=True)
    return all(np.array_equal(a.store.view(x), b.store.view(y)) for x, y in pairs)
