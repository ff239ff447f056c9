"""Settings of an instance that decodes by CrossPool, as a TOML file spells them. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from poolweave.crosspool_engine.config import EngineConfig
from poolweave.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossPoolConfig:
    """Workers and pools of one DecodeEngine; see EngineConfig for each.

    `plan`: a file that `poolweave plan` wrote; it sets `kv_budget` and the ranks, which are then left out. Without one
    they are 512 MiB and one rank each. Raises ConfigError.
    """

    plan: str | None = None
    kv_budget: str | int | None = None
    attention_ranks: int | None = None
    ffn_ranks: int | None = None
    ffn_hosts: tuple[str, ...] = ()
    cores: tuple[int, ...] | None = None
    max_tokens: int = 2048
    max_batch: int = 4
    in_flight: int = 2
    lowered: bool = True
    max_waiting: int = 256
    deadline_s: float = 60.0

    def __post_init__(self) -> None:
        planned = [name for name in _PLANNED if getattr(self, name) is not None]
        if self.plan is not None and planned:
            raise ConfigError(f"the plan says {planned[0]}: leave it out", setting=planned[0])
        if self.plan is None:
            EngineConfig(**self.settings(), **self.pools())  # its checks

    def pools(self) -> dict[str, Any]:
        """What a plan would say."""
        defaults: dict[str, Any] = {"kv_budget": "512MiB", "attention_ranks": 1, "ffn_ranks": 1}
        given = {name: getattr(self, name) for name in _PLANNED}
        return {name: default if given[name] is None else given[name] for name, default in defaults.items()}

    def settings(self) -> dict[str, Any]:
        """EngineConfig's others."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("plan", *_PLANNED)}


_PLANNED = ("kv_budget", "attention_ranks", "ffn_ranks")
