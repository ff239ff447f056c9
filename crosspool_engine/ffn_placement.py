"""Which FFN rank holds what of one model: whole layers, or some experts of each. Values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poolweave.crosspool_engine.model_shape import ModelShape
from poolweave.crosspool_engine.planner.plan import Plan
from poolweave.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FfnPart:
    """What one rank holds of `layers`: all of it (`experts` None), or these routed experts of each mixture layer.

    `unrouted`: shared experts and dense FFNs among it. Routers lie on every rank that has experts.
    """

    layers: tuple[int, ...]
    experts: tuple[int, ...] | None = None
    unrouted: bool = True


@dataclass(frozen=True, slots=True)
class FfnPlacement:
    """Parts by rank. A layer's ranks work on a batch one after the other, the lowest first."""

    parts: Mapping[int, FfnPart]

    @classmethod
    def by_layer(cls, owners: Sequence[int]) -> FfnPlacement:
        """`owners`: the rank of each layer."""
        layers = {rank: tuple(n for n, owner in enumerate(owners) if owner == rank) for rank in sorted(set(owners))}
        return cls({rank: FfnPart(own) for rank, own in layers.items()})

    @classmethod
    def even(cls, shape: ModelShape, ranks: int) -> FfnPlacement:
        """Layers in runs of equal length."""
        return cls.by_layer([layer * ranks // shape.num_layers for layer in range(shape.num_layers)])

    @classmethod
    def by_expert(cls, shape: ModelShape, ranks: int) -> FfnPlacement:
        """Experts in runs of equal length over all ranks; what is not routed, on rank 0. A dense model lies there."""
        count = shape.experts.num if shape.experts else 0
        runs = {rank: tuple(n for n in range(count) if n * ranks // count == rank) for rank in range(ranks)}
        return cls._experts(shape, runs, unrouted=0)

    @classmethod
    def of_plan(cls, plan: Plan, name: str, shape: ModelShape) -> FfnPlacement:
        """As a plan places a model, ranks counted from its first weights rank. Raises ConfigError for another model."""
        model = next((each for each in plan.models if each.name == name), None)
        if model is None:
            raise ConfigError(f"the plan has no model {name!r}: {[m.name for m in plan.models]}", setting="plan")
        if (model.architecture, model.num_layers) != (shape.architecture, shape.num_layers):
            raise ConfigError(
                f"the plan's {name!r} is a {model.architecture} of {model.num_layers} layers, this is a "
                f"{shape.architecture} of {shape.num_layers}", setting="plan",
            )  # fmt: skip
        pieces = [(plan.weights_ranks.index(piece.rank), piece) for piece in model.ffn]
        if all(piece.experts is None for _, piece in pieces):
            owner = {layer: rank for rank, piece in pieces for layer in piece.layers}
            return cls.by_layer([owner[layer] for layer in range(shape.num_layers)])
        runs: dict[int, tuple[int, ...]] = {}
        for rank, piece in pieces:
            runs[rank] = runs.get(rank, ()) + (piece.experts or ())
        return cls._experts(shape, runs, unrouted=next(rank for rank, piece in pieces if piece.experts == ()))

    @classmethod
    def _experts(cls, shape: ModelShape, runs: Mapping[int, tuple[int, ...]], *, unrouted: int) -> FfnPlacement:
        everywhere = tuple(range(shape.num_layers))
        mixtures = tuple(layer for layer in everywhere if not shape.is_dense(layer))
        parts = {rank: FfnPart(mixtures, experts, unrouted=False) for rank, experts in runs.items() if experts}
        parts[unrouted] = FfnPart(everywhere, runs.get(unrouted, ()))
        return cls(dict(sorted(parts.items())))

    def owners(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """The ranks of each layer, ascending."""
        return tuple(tuple(r for r, part in self.parts.items() if n in part.layers) for n in range(num_layers))

    def check(self, shape: ModelShape, ranks: int) -> None:
        """Raises ConfigError unless every layer and expert of a model lies on just one of `ranks` ranks."""
        placed = [pair for part in self.parts.values() for layer in part.layers for pair in _units(shape, layer, part)]
        whole = FfnPart(tuple(range(shape.num_layers)))
        if not set(self.parts) <= set(range(ranks)) or sorted(placed) != sorted(
            pair for layer in whole.layers for pair in _units(shape, layer, whole)
        ):
            raise ConfigError(
                f"FFN ranks {sorted(self.parts)} of {ranks} do not hold each of {shape.num_layers} layers, and each "
                "expert, just once", setting="placement", value=sorted(self.parts), limit=ranks,
            )  # fmt: skip


def _units(shape: ModelShape, layer: int, part: FfnPart) -> list[tuple[int, int]]:
    """(layer, expert) of what a part holds in a layer; expert -1 is what no router chooses."""
    if not 0 <= layer < shape.num_layers:
        return [(layer, -2)]
    routed = 0 if shape.is_dense(layer) or shape.experts is None else shape.experts.num
    experts = range(routed) if part.experts is None else part.experts if routed else ()
    return [(layer, expert) for expert in ((-1,) if part.unrouted else ())] + [(layer, e) for e in experts]
