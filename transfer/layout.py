"""How the KV of one block lies in memory: parts, orders and sizes. Knows no pool and no transport.

Source: MemServe §5.2 (block aggregation), facts of the model configurations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from poolweave.errors import ConfigError

Order = Literal["aggregated", "layered", "token_major"]
Shard = Literal["split", "replicate"]

# bfloat16 has no numpy type: a view shows its raw 16 bits.
_DTYPES: dict[str, tuple[str, int]] = {"float32": ("f4", 4), "float16": ("f2", 2), "bfloat16": ("u2", 2)}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor kept a token and layer: `heads` x `dim` numbers, and what tensor parallelism does to it."""

    name: str
    heads: int
    dim: int
    shard: Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The KV of `block_tokens` tokens for all layers, as one *aggregated* block or as layers x parts small ones.

    "layered" is layer-major paging, as vLLM's: one array a layer and part. "token_major" keeps all layers of a token
    together. A view over a tier has the same axes in all orders,
    `[slot, layer, part, block_tokens, heads, dim]`: only its strides differ.
    Raises ConfigError for sizes that are not positive and for dtypes or orders it does not know.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int = 16
    dtype: str = "float16"
    order: Order = "aggregated"
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_layers", "kv_heads", "head_dim", "block_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}", setting=name, value=value)
        if self.dtype not in _DTYPES:
            raise ConfigError(
                f"dtype {self.dtype!r} is not one of {sorted(_DTYPES)}", setting="dtype", value=self.dtype
            )
        if self.order not in get_args(Order):
            raise ConfigError(
                f"order {self.order!r} is not one of {', '.join(get_args(Order))}",
                setting="order",
                value=self.order,
            )
        if not self.parts:
            parts = tuple(Part(name, self.kv_heads, self.head_dim, "split") for name in ("k", "v"))
            object.__setattr__(self, "parts", parts)
        if any((part.heads, part.dim) != (self.kv_heads, self.head_dim) for part in self.parts):
            raise ConfigError("all parts of a layout have the same heads and dim", setting="parts")

    @classmethod
    def mla(
        cls, *, num_layers: int, rank: int, rope: int, block_tokens: int = 16, dtype: str = "bfloat16",
        order: Order = "aggregated",
    ) -> KVLayout:  # fmt: skip
        """The layout of latent attention: one replicated part of `rank + rope` numbers a token and layer."""
        part = Part("latent", 1, rank + rope, "replicate")
        return cls(
            num_layers=num_layers, kv_heads=1, head_dim=rank + rope, block_tokens=block_tokens, dtype=dtype,
            order=order, parts=(part,),
        )  # fmt: skip

    @property
    def dtype_bytes(self) -> int:
        return _DTYPES[self.dtype][1]

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """The element type of a view; raw uint16 for bfloat16."""
        return np.dtype(_DTYPES[self.dtype][0])

    @property
    def num_planes(self) -> int:
        """Small blocks in a block: layers x parts. 2L for K and V."""
        return self.num_layers * len(self.parts)

    @property
    def plane_bytes(self) -> int:
        """Bytes of one small block: one part of one layer for `block_tokens` tokens."""
        return self.block_tokens * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in a small block: all heads of one part of one layer."""
        return self.kv_heads * self.head_dim * self.dtype_bytes

    def strides(self, num_slots: int) -> tuple[int, int, int]:
        """Bytes from a slot, a plane (layer, part) and a row (token) to the next, in a tier of `num_slots` slots."""
        if self.order == "aggregated":
            return self.block_bytes, self.plane_bytes, self.row_bytes
        if self.order == "token_major":
            return self.block_bytes, self.row_bytes, self.num_planes * self.row_bytes
        return self.plane_bytes, num_slots * self.plane_bytes, self.row_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block, all layers and parts."""
        return self.num_planes * self.plane_bytes

    @property
    def bytes_per_token(self) -> int:
        return self.block_bytes // self.block_tokens

    def runs(self, num_layers: int) -> int:
        """Runs of memory in which that many neighbouring layers of a block lie; blocks side by side may need fewer."""
        if self.order == "aggregated" or (self.order == "token_major" and num_layers == self.num_layers):
            return 1
        return self.block_tokens if self.order == "token_major" else num_layers * len(self.parts)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, the last one perhaps partly filled."""
        return math.ceil(num_tokens / self.block_tokens)

    def fingerprint(self) -> str:
        """Everything that must be equal for blocks to be copied as they are; the order is free."""
        parts = ",".join(f"{p.name}:{p.heads}x{p.dim}:{p.shard}" for p in self.parts)
        return f"{self.num_layers}L[{parts}]x{self.block_tokens}t:{self.dtype}"

    def view(self, buffer: npt.NDArray[np.uint8], num_slots: int) -> npt.NDArray[np.generic]:
        """`buffer` as `[num_slots, num_layers, num_parts, block_tokens, kv_heads, head_dim]`, without a copy."""
        inner = (self.block_tokens, self.kv_heads, self.head_dim)
        flat = buffer[: num_slots * self.block_bytes].view(self.numpy_dtype)
        if self.order == "aggregated":
            return flat.reshape(num_slots, self.num_layers, len(self.parts), *inner)
        if self.order == "token_major":
            rows = flat.reshape(num_slots, self.block_tokens, self.num_layers, len(self.parts), *inner[1:])
            return rows.transpose(0, 2, 3, 1, 4, 5)
        planes = flat.reshape(self.num_layers, len(self.parts), num_slots, *inner)
        return planes.transpose(2, 0, 1, 3, 4, 5)
