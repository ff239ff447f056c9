"""A model that an engine serves: what is needed to place its requests, and to activate it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from poolweave.crosspool_engine.config import EngineConfig
from poolweave.crosspool_engine.kv_layout import kv_layout
from poolweave.crosspool_engine.model_shape import ModelShape
from poolweave.crosspool_engine.planner.plan import Plan
from poolweave.crosspool_engine.request import DecodeRequest
from poolweave.crosspool_engine.worker_messages import Activate
from poolweave.errors import ConfigError, RequestRefused
from poolweave.transfer.layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """`owners`: the FFN rank of each layer. `max_blocks`: of its KV range, which spans the whole budget."""

    name: str
    index: int
    path: str
    dtype: str
    shape: ModelShape
    layout: KVLayout
    owners: tuple[int, ...]
    max_blocks: int

    @classmethod
    def of(
        cls, name: str, path: str, *, index: int, dtype: str, config: EngineConfig, owners: Sequence[int] | None
    ) -> ServedModel:
        """Raises ModelNotFound, or ConfigError for a model, owners or a budget that do not fit each other."""
        shape = ModelShape.from_directory(path)
        layout = kv_layout(shape, block_tokens=config.block_tokens, dtype=dtype)
        budget_bytes = config.budget_pages * config.page_bytes
        if owners is None:
            owners = spread(shape.num_layers, config.ffn_ranks)
        if len(owners) != shape.num_layers or not set(owners) <= set(range(config.ffn_ranks)):
            raise ConfigError(
                f"{name} has {shape.num_layers} layers on {config.ffn_ranks} FFN ranks, owners is {tuple(owners)}",
                setting="owners", value=tuple(owners), limit=config.ffn_ranks,
            )  # fmt: skip
        if shape.hidden > config.max_hidden:
            raise ConfigError(
                f"{name} is {shape.hidden} wide, max_hidden {config.max_hidden}", setting="max_hidden",
                value=shape.hidden, limit=config.max_hidden,
            )  # fmt: skip
        if budget_bytes < layout.block_bytes:
            raise ConfigError(
                f"kv_budget {budget_bytes} holds no block of {name}, {layout.block_bytes} bytes", setting="kv_budget",
                value=budget_bytes, limit=layout.block_bytes,
            )  # fmt: skip
        return cls(
            name=name, index=index, path=path, dtype=dtype, shape=shape, layout=layout, owners=tuple(owners),
            max_blocks=budget_bytes // layout.block_bytes,
        )  # fmt: skip

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
        """What each worker loads, by place: the attention worker all but the FFN, each FFN rank its layers."""
        found = {0: Activate(self.index, self.path, self.dtype, max_blocks=self.max_blocks)}
        for rank in sorted(set(self.owners)):
            layers = tuple(layer for layer, owner in enumerate(self.owners) if owner == rank)
            found[1 + rank] = Activate(self.index, self.path, self.dtype, layers=layers, num_layers=len(self.owners))
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


def spread(num_layers: int, ranks: int) -> tuple[int, ...]:
    """Layers over ranks in runs of equal length, when no plan says otherwise."""
    return tuple(layer * ranks // num_layers for layer in range(num_layers))


def owners_in_plan(plan: Plan, model: str) -> tuple[int, ...]:
    """FFN rank of each layer of a model as a plan places it, ranks counted from its first weights rank.

    Raises ConfigError for a model that is not in the plan, or experts split over ranks, which is not served.
    """
    found = next((each for each in plan.models if each.name == model), None)
    if found is None or plan.split != "layer":
        raise ConfigError(f"the plan has no layers of {model!r} on ranks, its split is {plan.split!r}", setting="plan")
    owner = {layer: plan.weights_ranks.index(piece.rank) for piece in found.ffn for layer in piece.layers}
    return tuple(owner[layer] for layer in range(found.num_layers))
