"""What `kv_connector_extra_config` may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from poolweave.config import from_mapping
from poolweave.errors import ConfigError
from poolweave.types import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """Settings of one engine's connector. Raises ConfigError for values out of range.

    `size`: bytes of the engine's own pool. `name`: by which peers know this engine; None draws one. `pool`: the name of
    a `poolweave pool` process that keeps KV beyond this engine's life. `peers`: where the other engines of a
    prefill/decode pair are reached, by name. `wait_s`: how long a request waits for KV that is on its way here before
    it is computed instead. `model_id`: says which weights these are, instead of a digest over all their bytes.
    `threads`: of a copy between vLLM's cache and the pool. `populate`: take all of `size` from the kernel at the start;
    otherwise each block's first use waits for its pages.
    """

    size: int | str = "1GiB"
    name: str | None = None
    pool: str | None = None
    peers: dict[str, str] = field(default_factory=dict)
    listen: str = "shm"
    wait_s: float = 10.0
    model_id: str | None = None
    threads: int = 1
    populate: bool = True

    def __post_init__(self) -> None:
        parse_bytes(self.size, "size")
        if not 0 < self.wait_s < 1e6:
            raise ConfigError(f"wait_s must be positive seconds, got {self.wait_s!r}", setting="wait_s")
        if not 1 <= self.threads <= 64:
            raise ConfigError(f"threads must lie in [1, 64], got {self.threads}", setting="threads", limit=64)
        if self.peers and self.name is None:
            raise ConfigError("an engine with peers needs a name by which they know it; set name", setting="name")

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """Of vLLM's `kv_connector_extra_config`. Raises ConfigError, also for keys it does not know."""
        return from_mapping(extra, cls, where="kv_connector_extra_config")
