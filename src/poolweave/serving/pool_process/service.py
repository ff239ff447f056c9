"""A pool in a process of its own: keeps KV of engines beyond their lives.

`python -m poolweave.serving.pool_process.service`.
Engines attach, send what they computed by transfer_with_insert, and ask for prefixes. It never computes.
"""

from __future__ import annotations

import logging
import secrets
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from poolweave.errors import ConfigError, LayoutMismatch
from poolweave.mempool import MemPool, PoolConfig
from poolweave.serving.control.messages import Done
from poolweave.serving.control.server import Caller, RpcServer
from poolweave.serving.pool_process.messages import (
    Attach,
    Attached,
    Fetch,
    PoolFigures,
    PoolRequest,
    PoolState,
    Sending,
    pool_address,
)
from poolweave.serving.process.service import run_process
from poolweave.types import Tier, parse_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolServiceConfig:
    """`name`: by which engines of this machine find it. `size`: bytes of KV. `eviction`: one of EVICTION_POLICIES."""

    name: str
    size: int | str = "1GiB"
    eviction: str = "lru"

    def __post_init__(self) -> None:
        pool_address(self.name)
        if not parse_bytes(self.size, "size"):
            raise ConfigError("a pool of 0 bytes keeps nothing; set size", setting="size", value=self.size)


class PoolService:
    """Binds at construction; the first engine's layout is the pool's, others are refused until it restarts.

    Raises AddressInUse when a process of this name runs, ConfigError.
    """

    def __init__(self, config: PoolServiceConfig) -> None:
        self._config = config
        self._server = RpcServer(
            pool_address(config.name), secrets.randbits(63) | 1, name=config.name, setting="name",
            accepts=PoolRequest, hello=Attach,
        )  # fmt: skip
        self._pool: MemPool | None = None
        self._engines: dict[bytes, str] = {}  # by client

    @property
    def address(self) -> str:
        """Where engines ask."""
        return self._server.address

    def serve(self) -> int:
        """Run until `stop`; -> the process's exit code."""
        logger.info("pool %s serves at %s", self._config.name, self.address)
        self._server.serve(self._handle, on_gone=self._forget)
        return 0

    def stop(self) -> None:
        """Let `serve` return; from any thread."""
        self._server.stop()

    def close(self) -> None:
        """Idempotent."""
        self._server.close()
        if self._pool is not None:
            self._pool.close()

    def _handle(self, caller: Caller, request: Any) -> None:
        if isinstance(request, Attach):
            caller.reply(self._attach(caller.client, request))
        elif isinstance(request, Fetch):
            caller.reply(Sending(self._fetch(request)))
        elif isinstance(request, PoolState):
            caller.reply(self._figures())
        else:
            caller.reply(Done())

    def _attach(self, client: bytes, request: Attach) -> Attached:
        if self._pool is None:
            self._pool = MemPool(
                request.layout, instance=f"pool-{self._config.name}", hbm=self._config.size,
                config=PoolConfig(max_hbm=self._config.size, eviction=self._config.eviction),
            )  # fmt: skip
        ours, theirs = self._pool.layout.fingerprint(), request.layout.fingerprint()
        if ours != theirs:
            raise LayoutMismatch(
                f"pool {self._config.name} keeps KV of {ours}, the engine {request.instance} has {theirs}; "
                "run another pool process for it",
                ours=ours,
                theirs=theirs,
            )
        self._engines[client] = request.instance
        self._pool.connect(request.instance, request.addresses)
        return Attached(self._pool.instance, self._pool.addresses)

    def _fetch(self, request: Fetch) -> int:
        assert self._pool is not None, "who fetches has attached"
        tokens = np.frombuffer(request.tokens, "<i4").astype(np.int32, copy=False)
        ns = self._pool.namespace_of(request.identity)
        with self._pool.match(tokens, ns) as hit:
            if hit.num_tokens <= request.have:
                return 0
            self._pool.transfer_with_insert(request.instance, hit.blocks, tokens[: hit.num_tokens], ns, tag=request.tag)
            return hit.num_tokens

    def _figures(self) -> PoolFigures:
        if self._pool is None:
            return PoolFigures(0, 0, 0)
        stats = self._pool.stats()
        tier = stats.tiers[Tier.HBM]
        return PoolFigures(stats.indexed, tier.active, tier.leased)

    def _forget(self, client: bytes) -> None:
        engine = self._engines.pop(client, None)
        if engine is not None and engine not in self._engines.values() and self._pool is not None:
            self._pool.disconnect(engine)


def main(arguments: list[str] | None = None) -> int:
    """The process; -> its exit code."""
    return run_process(PoolServiceConfig, PoolService, "poolweave.serving.pool_process.service", arguments)


if __name__ == "__main__":
    sys.exit(main())
