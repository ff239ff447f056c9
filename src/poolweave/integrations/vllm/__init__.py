"""vLLM on a MemPool: `--kv-transfer-config` names this module and `PoolConnector`. Only the connector needs vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poolweave.integrations.vllm.connector import PoolConnector

__all__ = ["PoolConnector"]


def __getattr__(name: str) -> Any:
    if name != "PoolConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from poolweave.integrations.vllm.connector import PoolConnector

    return PoolConnector
