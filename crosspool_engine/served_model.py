"""A model that an engine serves: what is needed to place its requests, and to activate it again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from poolweave.crosspool_engine.config import EngineConfig
from poolweave.crosspool_engine.ffn_placement import FfnPlacement
from poolweave.crosspool_engine.head_shard import HeadShard
from poolweave.crosspool_engine.kv_layout import kv_layout
from poolweave.crosspool_engine.model_shape import ModelShape
from poolweave.crosspool_engine.request import DecodeRequest
from poolweave.crosspool_engine.worker_messages import Activate
from poolweave.errors import ConfigError, RequestRefused
from poolweave.transfer.layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How a model is to be served.

    `replicas`: the attention ranks of each copy of its attention, whose heads these share; None: a copy on each rank.
    """

    path: str
    dtype: str = "float32"
    placement: FfnPlacement | None = None
    replicas: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """`owners`: the FFN ranks of each layer. `max_blocks`: of its KV range, all the budget, by attention rank.

    `layout`: of KV of all heads.
    """

    name: str
    index: int
    path: str
    dtype: str
    shape: ModelShape
    layout: KVLayout
    placement: FfnPlacement
    owners: tuple[tuple[int, ...], ...]
    shards: dict[int, HeadShard]  # by attention rank
    replicas: tuple[tuple[int, ...], ...]
    max_blocks: dict[int, int]
    attention_ranks: int  # of the engine: FFN ranks' places come after them

    @classmethod
    def of(cls, name: str, serving: Serving, *, index: int, config: EngineConfig) -> ServedModel:
        """Raises ModelNotFound, or ConfigError for a model, a placement or a budget that do not fit each other."""
        shape = ModelShape.from_directory(serving.path)
        layout = kv_layout(shape, block_tokens=config.block_tokens, dtype=serving.dtype)
        placement = serving.placement or FfnPlacement.even(shape, config.ffn_ranks)
        placement.check(shape, config.ffn_ranks)
        if shape.hidden > config.max_hidden:
            raise ConfigError(
                f"{name} is {shape.hidden} wide, max_hidden {config.max_hidden}", setting="max_hidden",
                value=shape.hidden, limit=config.max_hidden,
            )  # fmt: skip
        replicas, shards = _spread(name, serving, config.attention_ranks)
        for shard in shards.values():
            shard.check(shape.attention)
        blocks = {rank: config.budget_pages(rank) * config.page_bytes for rank in shards}
        for rank, shard in shards.items():
            share = kv_layout(shape, block_tokens=config.block_tokens, dtype=serving.dtype, shard=shard)
            blocks[rank] //= share.block_bytes
        if min(blocks.values()) < 1:
            raise ConfigError(
                f"kv_budget holds no block of {name}, {layout.block_bytes} bytes", setting="kv_budget",
                limit=layout.block_bytes,
            )  # fmt: skip
        return cls(
            name=name, index=index, path=serving.path, dtype=serving.dtype, shape=shape, layout=layout,
            placement=placement, owners=placement.owners(shape.num_layers), shards=shards, replicas=replicas,
            max_blocks=blocks,
            attention_ranks=config.attention_ranks,
        )  # fmt: skip

    @property
    def ranks(self) -> tuple[int, ...]:
        """Attention ranks that have it."""
        return tuple(self.max_blocks)

    def layout_on(self, rank: int) -> KVLayout:
        """Of the heads that lie on an attention rank."""
        layout = self.layout
        return kv_layout(self.shape, block_tokens=layout.block_tokens, dtype=layout.dtype, shard=self.shards[rank])

    def kv_heads(self, rank: int) -> range:
        """Which of the layout's heads those are."""
        return self.shards[rank].rows(self.layout.kv_heads, 1)

    @property
    def ffn_places(self) -> frozenset[int]:
        """Places of the workers that hold its FFN: it needs them all."""
        return frozenset(self.attention_ranks + rank for rank in self.placement.parts)

    @property
    def layer_cost(self) -> float:
        """Weights a token reads in a layer, attention and FFN, on average: what fairness weighs a layer with."""
        active = sum(self.shape.active_ffn_params(layer) for layer in range(self.shape.num_layers))
        return (active + self.shape.attention_params) / self.shape.num_layers

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Axes of one block of KV."""
        layout = self.layout
        return layout.num_layers, len(layout.parts), layout.block_tokens, layout.kv_heads, layout.head_dim

    def orders(self) -> dict[int, Activate]:
        """What each worker loads, by place: attention ranks all but the FFN, each FFN rank its part."""
        found = {
            rank: Activate(
                self.index,
                self.path,
                self.dtype,
                max_blocks=blocks,
                share=self.shards[rank].number,
                width=self.shards[rank].width,
            )
            for rank, blocks in self.max_blocks.items()
        }
        for rank, part in self.placement.parts.items():
            found[self.attention_ranks + rank] = Activate(
                self.index, self.path, self.dtype, layers=part.layers, experts=part.experts, unrouted=part.unrouted,
                num_layers=len(self.owners),
            )  # fmt: skip
        return found

    def refuse_impossible(self, request: DecodeRequest, config: EngineConfig) -> None:
        """Raises RequestRefused for a request that this model can never decode here."""
        limit = min(config.max_tokens, self.shape.max_positions)
        if request.end > limit:
            raise RequestRefused(
                f"{request.end} tokens at most, {request.model} takes {limit} here", needed=request.end, limit=limit
            )
        if int(np.max(request.tokens)) >= self.shape.vocab:
            raise RequestRefused(f"a token is outside the vocabulary of {self.shape.vocab}", limit=self.shape.vocab)
        if request.kv is not None:
            shape = self.layout.num_blocks(request.num_computed), *self.row_shape
            if request.kv.shape != shape or request.kv.dtype != self.layout.numpy_dtype:
                raise RequestRefused(
                    f"KV of {request.num_computed} tokens is {shape} of {self.layout.numpy_dtype}, got "
                    f"{request.kv.shape} of {request.kv.dtype}"
                )


def _spread(
    name: str, serving: Serving, attention_ranks: int
) -> tuple[tuple[tuple[int, ...], ...], dict[int, HeadShard]]:
    """The replicas, each in the order of its ranks, and each rank's share of the heads."""
    asked = tuple((rank,) for rank in range(attention_ranks)) if serving.replicas is None else serving.replicas
    ranks = [rank for replica in asked for rank in replica]
    if not asked or not all(asked) or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(attention_ranks)):
        raise ConfigError(
            f"{name} is to run on attention ranks {asked}, each once, of {attention_ranks}", setting="replicas",
            value=asked, limit=attention_ranks,
        )  # fmt: skip
    replicas = tuple(tuple(sorted(replica)) for replica in asked)
    shards = {rank: HeadShard(share, len(one)) for one in replicas for share, rank in enumerate(one)}
    return replicas, shards
