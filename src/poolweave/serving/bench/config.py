"""Settings of the transfer study. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from poolweave.errors import ConfigError
from poolweave.transfer import KVLayout
from poolweave.transfer.layout import Order
from poolweave.transfer.transports import TRANSPORTS

STUDIES = ("layout", "granularity", "connections")
_SEPARATE = tuple(name for name in TRANSPORTS if name != "inproc")  # between processes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Whose KV is moved; Llama-2-13B's unless said otherwise."""

    layers: int = 40
    kv_heads: int = 40
    head_dim: int = 128
    block_tokens: int = 16
    dtype: str = "float16"

    def layout(self, order: Order) -> KVLayout:
        """Raises ConfigError for sizes and dtypes that cannot be."""
        return KVLayout(
            num_layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim, block_tokens=self.block_tokens,
            dtype=self.dtype, order=order,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """What is measured. Raises ConfigError for values out of range.

    `tokens`: prompt sizes of the layout study. `connections`: data connections over tcp, copying threads over shm.
    `layer_ms`: how long a layer is computed in the granularity study, whose prompts have `prompt_tokens`; `loads` are
    shares of what one instance can compute. `peers`: how many are connected to see what one costs.
    """

    model: ModelShape = field(default_factory=ModelShape)
    studies: tuple[str, ...] = STUDIES
    transports: tuple[str, ...] = ("shm", "tcp")
    tokens: tuple[int, ...] = (64, 256, 1024)
    connections: tuple[int, ...] = (1, 2)
    repeats: int = 5
    layer_ms: float = 1.0
    prompt_tokens: int = 64
    loads: tuple[float, ...] = (0.3, 0.6, 0.9)
    requests: int = 24
    peers: int = 32
    checksums: bool = True

    def __post_init__(self) -> None:
        self.model.layout("aggregated")
        for name, known in (("studies", STUDIES), ("transports", _SEPARATE)):
            for one in _several(self, name):
                if one not in known:
                    raise ConfigError(f"{name}: {one!r} is not one of {', '.join(known)}", setting=name, value=one)
        for name, least, most in (("tokens", 1, 1 << 20), ("connections", 1, 64), ("loads", 0.01, 1.5)):
            for one in _several(self, name):
                _within(name, one, least, most)
        for name, most in (("repeats", 1000), ("requests", 10_000), ("prompt_tokens", 1 << 20), ("peers", 1000)):
            _within(name, getattr(self, name), 1, most)
        _within("layer_ms", self.layer_ms, 0.0, 1000.0)

    def as_json(self) -> dict[str, Any]:
        """For the result's file."""
        plain = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "model"}
        return {"model": {one.name: getattr(self.model, one.name) for one in fields(self.model)}, **plain}


def _several(config: StudyConfig, name: str) -> tuple[Any, ...]:
    values: tuple[Any, ...] = getattr(config, name)
    if not values:
        raise ConfigError(f"{name} is empty; name at least one", setting=name, value="")
    return values


def _within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name}={value} lies outside [{least}, {most}]", setting=name, value=value, limit=most)
