"""One engine with its pool, on the model of vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from ref_vllm_engine import BLOCK, LAYERS, PAGE, Engine, Request
from ref_waiting import until

from poolweave.index import Identity
from poolweave.integrations.vllm.pool_client import PoolClient
from poolweave.integrations.vllm.scheduler_side import SchedulerSide
from poolweave.integrations.vllm.traffic import Traffic
from poolweave.integrations.vllm.worker_side import CacheLayer, WorkerSide
from poolweave.mempool import MemPool, PoolConfig
from poolweave.transfer import KVLayout
from poolweave.transfer.layout import Part
from poolweave.types import Tier

LAYOUT = KVLayout(
    num_layers=LAYERS, kv_heads=1, head_dim=PAGE // BLOCK, block_tokens=BLOCK, dtype="float32",
    parts=(Part("page-test", 1, PAGE // BLOCK, "replicate"),),
)  # fmt: skip


class House:
    """One engine with its pool."""

    def __init__(
        self, *, blocks: int = 64, pages: int = 32, copy: Callable[..., None] | None = None, role: str = "kv_both",
        name: str | None = None, peers: Mapping[str, str] | None = None, keeper: str | None = None, wait_s: float = 60,
    ) -> None:  # fmt: skip
        size = blocks * LAYOUT.block_bytes
        self.pool = MemPool(LAYOUT, instance=name, hbm=size, config=PoolConfig(max_hbm=size, page_bytes=4096))
        client = None if keeper is None else PoolClient(keeper, self.pool, wait_s)
        self.traffic = Traffic(self.pool, role, peers or {}, client, wait_s)
        self.scheduler = SchedulerSide(self.pool, Identity(model="m"), self.traffic)
        cache = np.zeros((LAYERS, pages, PAGE), np.float32)
        layers = {f"layer.{i}": CacheLayer(cache[i].ctypes.data, pages, PAGE * 4) for i in range(LAYERS)}
        self.worker = WorkerSide(layers, 1, copy)
        self.engine = Engine(self.scheduler, self.worker, cache)
        self._names = 0

    def request(self, prompt: list[int], max_tokens: int = 3, **more: Any) -> Request:
        self._names += 1
        return Request(f"r{self._names}", prompt, max_tokens, **more)

    def run(self, prompt: list[int], max_tokens: int = 3, **more: Any) -> Request:
        request = self.request(prompt, max_tokens, **more)
        self.engine.add(request)
        until(lambda: request in self.engine.step(), f"{request.request_id} ends")
        return request

    def quiet(self) -> bool:
        """Whether no block is lent to a transfer or held by one."""
        tier = self.pool.stats().tiers[Tier.HBM]
        return tier.leased == tier.active == 0

    def idle(self) -> None:
        """Nothing is held once nothing runs."""
        assert self.pool.stats().tiers[Tier.HBM].active == 0
        self.pool.check()
