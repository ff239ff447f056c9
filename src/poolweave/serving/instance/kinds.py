"""What an instance computes with: the models of a process and the engine that they share. One row a kind.

A kind is built before any pool, since a model says what its KV looks like; its engine after them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from poolweave.index import Identity
from poolweave.mempool import MemPool
from poolweave.serving.instance.config import InstanceConfig
from poolweave.serving.instance.job_runner import Engine
from poolweave.transfer import KVLayout


class Served(Protocol):
    """A model as a station needs it."""

    @property
    def layout(self) -> KVLayout: ...
    @property
    def identity(self) -> Identity: ...
    @property
    def max_positions(self) -> int: ...


class KindOfEngine(Protocol):
    """`models` by name, "" where there is one without a name."""

    @property
    def models(self) -> Mapping[str, Served]: ...

    def engine(self, pools: Mapping[str, MemPool]) -> Engine:
        """Over one pool a model. Called once."""

    def counters(self) -> dict[str, Any]:
        """Figures of the engine as plain values. Any thread."""

    def close(self) -> None:
        """Free everything but the pools. Idempotent."""


def make_kind(config: InstanceConfig) -> KindOfEngine:
    """Raises ModelNotFound, ModelUnsupported, WeightsMismatch, ConfigError, WorkerLost; then nothing is left open."""
    return _KINDS[config.kind](config)


def _torch(config: InstanceConfig) -> KindOfEngine:
    from poolweave.serving.engine.torch_kind import TorchKind

    return TorchKind(config)


def _crosspool(config: InstanceConfig) -> KindOfEngine:
    from poolweave.serving.crosspool.kind import CrossPoolKind

    return CrossPoolKind(config)


_KINDS: Mapping[str, Callable[[InstanceConfig], KindOfEngine]] = {"torch": _torch, "crosspool": _crosspool}
