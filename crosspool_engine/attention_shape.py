"""The two kinds of attention as sizes: what is kept a token and what a layer weighs. Knows no other part of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAttention:
    """MHA, GQA and MQA: `heads` queries share `kv_heads` keys and values of `head_dim` numbers."""

    heads: int
    kv_heads: int
    head_dim: int
    head_norms: bool = False  # Qwen3: one RMS norm over each query and key head
    bias: bool = False

    @property
    def kv_numbers(self) -> int:
        """Numbers kept a token and layer."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def kv_products(self) -> int:
        """Multiply-adds of a decode step over one cached token of a layer: queries with keys, weights with values."""
        return 2 * self.heads * self.head_dim

    @property
    def kv_shards(self) -> int:
        """Ranks over which one token's KV can be split without keeping anything twice."""
        return self.kv_heads

    def num_params(self, hidden: int) -> int:
        """Weights of one layer: four projections, their biases, and the head norms."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = q + 2 * kv + hidden if self.bias else 0
        return hidden * (2 * q + 2 * kv) + biases + (2 * self.head_dim if self.head_norms else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """MLA: one latent of `kv_rank` and one roped key of `rope` numbers a token, for all `heads`."""

    heads: int
    q_rank: int | None  # None: queries come straight from the hidden state
    kv_rank: int
    nope: int
    rope: int
    v_dim: int
    bias: bool = False

    @property
    def kv_numbers(self) -> int:
        """Numbers kept a token and layer."""
        return self.kv_rank + self.rope

    @property
    def kv_products(self) -> int:
        """Multiply-adds of an absorbed decode step over one cached token of a layer: every head, twice over it."""
        return self.heads * (2 * self.kv_rank + self.rope)

    @property
    def kv_shards(self) -> int:
        """One: every head reads the same latent, so a second rank would keep a copy."""
        return 1

    def num_params(self, hidden: int) -> int:
        """Weights of one layer: query path, latent path with its norm, expansion, output."""
        q_out = self.heads * (self.nope + self.rope)
        if self.q_rank is None:
            query = hidden * q_out
        else:
            query = self.q_rank * (hidden + 1 + q_out) + (self.q_rank if self.bias else 0)
        latent = hidden * (self.kv_rank + self.rope) + self.kv_rank + (self.kv_rank + self.rope if self.bias else 0)
        expand = self.kv_rank * self.heads * (self.nope + self.v_dim)
        return query + latent + expand + self.heads * self.v_dim * hidden + (hidden if self.bias else 0)


Attention: TypeAlias = GroupedAttention | LatentAttention
