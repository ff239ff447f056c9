"""Links: the transfer engine of a pool, made at its first use. Knows how a pool's words become shipments."""

from __future__ import annotations

import threading

from poolweave.errors import ConfigError, InstanceClosed
from poolweave.mempool.catalogue import Catalogue
from poolweave.mempool.store import PoolStore
from poolweave.transfer import Payer, TransferConfig, TransferEngine, TransferStats
from poolweave.types import Int32Array, UInt64Array


class Links:
    """Thread-safe. The engine listens from its first use on, until close()."""

    def __init__(self, instance: str, store: PoolStore, catalogue: Catalogue, config: TransferConfig | None) -> None:
        self._instance = instance
        self._store = store
        self._catalogue = catalogue
        self._config = config
        self._mutex = threading.Lock()
        self._engine: TransferEngine | None = None
        self._closed = False

    @property
    def engine(self) -> TransferEngine:
        """Raises InstanceClosed, AddressInUse, and ConfigError for settings that cannot be."""
        with self._mutex:
            if self._closed:
                raise InstanceClosed("this pool was closed before")
            if self._engine is None:
                self._engine = TransferEngine(self._instance, self._store, self._config or self._default())
            return self._engine

    def _default(self) -> TransferConfig:
        """Shared memory; where a tier stands in a shared arena TCP, and for the arena's other pools hand-over; between
        GPUs NCCL."""
        regions = self._store.regions()
        if any(region.device is not None for region in regions):
            return TransferConfig(listen="nccl")
        if all(region.fd >= 0 for region in regions):
            return TransferConfig(listen="shm")
        hosts = any(region.joint is not None and region.joint.guests is not None for region in regions)
        return TransferConfig(listen=("arena", "tcp") if hosts else "tcp")

    def prompt(self, tokens: Int32Array, blocks: UInt64Array, ns: int | None) -> tuple[Int32Array, bytes, bytes]:
        """Tokens, identity and tenant of a shipment that is to be indexed. Raises ConfigError when blocks do not
        fit."""
        needed = self._store.layout.num_blocks(len(tokens))
        if len(blocks) != needed:
            raise ConfigError(
                f"{len(tokens)} tokens lie in {needed} blocks, got {len(blocks)}",
                setting="blocks", value=len(blocks), limit=needed,
            )  # fmt: skip
        payer = self.payer(ns)
        return tokens, payer.identity, payer.tenant

    def payer(self, ns: int | None) -> Payer:
        """Whose quota pays at a peer. Raises ConfigError for a namespace that namespace() did not give."""
        return Payer(self._catalogue.digest(ns), self._catalogue.tenant_digest(ns))

    def whole(self, blocks: UInt64Array, num_tokens: int | None) -> int:
        """`num_tokens`, or all that fit the blocks. Raises ConfigError when they do not end in the last block."""
        layout = self._store.layout
        if num_tokens is None:
            return len(blocks) * layout.block_tokens
        if layout.num_blocks(num_tokens) != len(blocks):
            raise ConfigError(
                f"num_tokens={num_tokens} lie in {layout.num_blocks(num_tokens)} blocks, got {len(blocks)}",
                setting="num_tokens", value=num_tokens, limit=len(blocks) * layout.block_tokens,
            )  # fmt: skip
        return num_tokens

    def stats(self) -> TransferStats | None:
        with self._mutex:
            return self._engine.stats() if self._engine is not None else None

    def check(self) -> None:
        with self._mutex:
            if self._engine is not None:
                self._engine.check()

    def close(self) -> None:
        """End all transfers. Idempotent."""
        with self._mutex:
            self._closed = True
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
