"""Settings of the demo. Needs no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from poolweave.errors import ConfigError
from poolweave.serving.crosspool.config import CrossPoolConfig
from poolweave.serving.instance.config import ClusterConfig, InstanceConfig, Transport
from poolweave.serving.instance.named_model import NamedModel
from poolweave.types import Role, parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What the demo runs: of each model `max_sessions` sessions, all at once.

    `hbm` is each model's pool at either instance, `kv_budget` CrossPool's KV pool for all models together;
    `timeout_s` is for one request. Raises ConfigError.
    """

    out: str = "poolweave-demo"
    turns: int = 2
    max_sessions: int = 2
    max_new_tokens: int = 20
    transport: Transport = "shm"
    hbm: str | int = "192MiB"
    kv_budget: str | int = "48MiB"
    timeout_s: float = 180.0

    def __post_init__(self) -> None:
        for setting in ("turns", "max_sessions", "max_new_tokens"):
            value = getattr(self, setting)
            if value < 1:
                raise ConfigError(f"{setting} must be at least 1, got {value}", setting=setting, value=value, limit=1)
        for setting in ("hbm", "kv_budget"):
            parse_bytes(getattr(self, setting), setting)

    def cluster(self, models: tuple[NamedModel, ...]) -> ClusterConfig:
        """One prefill process on torch, one CrossPool process with two workers."""
        crosspool = CrossPoolConfig(kv_budget=self.kv_budget, max_tokens=1024, max_batch=4)
        prefill = InstanceConfig(name=f"prefill-{os.getpid()}", role=Role.PREFILL, models=models, hbm=self.hbm)
        decode = InstanceConfig(
            name=f"crosspool-{os.getpid()}", role=Role.DECODE, kind="crosspool", models=models, hbm=self.hbm,
            crosspool=crosspool,
        )  # fmt: skip
        return ClusterConfig(instances=(prefill, decode), transport=self.transport)
