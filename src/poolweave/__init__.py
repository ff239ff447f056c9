"""poolweave: an elastic KV-cache memory pool and transfer service for LLM serving."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poolweave.errors import OutOfBlocks, PoolweaveError
    from poolweave.index import Identity, RadixIndex
    from poolweave.mempool import Blocks, MemPool
    from poolweave.scheduler import GlobalScheduler, PromptTree
    from poolweave.transfer import KVLayout
    from poolweave.types import Tier

__version__ = "0.1.0"
__all__ = [
    "Blocks",
    "GlobalScheduler",
    "Identity",
    "KVLayout",
    "MemPool",
    "OutOfBlocks",
    "PoolweaveError",
    "PromptTree",
    "RadixIndex",
    "Tier",
]

_HOMES = {
    "Blocks": "poolweave.mempool",
    "GlobalScheduler": "poolweave.scheduler",
    "Identity": "poolweave.index",
    "KVLayout": "poolweave.transfer",
    "MemPool": "poolweave.mempool",
    "OutOfBlocks": "poolweave.errors",
    "PoolweaveError": "poolweave.errors",
    "PromptTree": "poolweave.scheduler",
    "RadixIndex": "poolweave.index",
    "Tier": "poolweave.types",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'poolweave' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
