"""Who sends what to whom when prefill and decode are cut differently: tensor parallel by heads, pipeline by layers.

A shard is what one rank holds of a model's KV. A plan is a list of routes between shards; each names the same bytes of
a block as windows at both ends, so the native extents of the two sides fit each other. Every byte of every target shard
is covered exactly once. Pure. Source: MemServe §4.4 (the sender partitions for the target's TP and PP).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from poolweave.errors import ConfigError, LayoutMismatch
from poolweave.transfer._native import Window
from poolweave.transfer.layout import KVLayout


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a model's KV is cut into `tp * pp` shards.

    Layers go to pipeline ranks in runs as even as can be. Heads go to tensor ranks in equal runs; with fewer heads than
    ranks each head is held by `tp / heads` ranks, and parts that are replicated (MLA's latents) by all.
    Raises ConfigError for heads and ranks of which neither divides the other, and for more stages than layers.
    """

    layout: KVLayout  # of the whole model
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        heads, layers = self.layout.kv_heads, self.layout.num_layers
        if self.tp < 1 or self.pp < 1:
            raise ConfigError(f"tp={self.tp} and pp={self.pp} must be positive", setting="tp", value=self.tp)
        if self.is_split and heads % self.tp and self.tp % heads:
            raise ConfigError(
                f"{heads} KV heads cannot be cut for tp={self.tp}: one must divide the other",
                setting="tp",
                value=self.tp,
                limit=heads,
            )
        if self.pp > layers:
            raise ConfigError(f"pp={self.pp} exceeds {layers} layers", setting="pp", value=self.pp, limit=layers)
        if len({part.shard for part in self.layout.parts}) > 1:
            raise ConfigError("parts with unlike shard rules are not supported in one layout", setting="parts")

    @property
    def is_split(self) -> bool:
        """False when every tensor rank holds all heads."""
        return self.layout.parts[0].shard == "split"

    @classmethod
    def whole(cls, layout: KVLayout) -> Shard:
        """The one shard of a model that is not cut."""
        return cls(layout=layout).shards[0]

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """All shards, pipeline rank by pipeline rank."""
        return tuple(Shard(self, stage, rank) for stage in range(self.pp) for rank in range(self.tp))


@dataclass(frozen=True)
class Shard:
    """What one rank holds: `layers` and `heads` of the whole model, stored as `layout`."""

    cut: Cut
    stage: int
    rank: int

    @property
    def layers(self) -> range:
        total, pp = self.cut.layout.num_layers, self.cut.pp
        return range(self.stage * total // pp, (self.stage + 1) * total // pp)

    @property
    def heads(self) -> range:
        heads, tp = self.cut.layout.kv_heads, self.cut.tp
        if not self.cut.is_split:
            return range(heads)
        if tp >= heads:
            one = self.rank * heads // tp
            return range(one, one + 1)
        return range(self.rank * heads // tp, (self.rank + 1) * heads // tp)

    @property
    def layout(self) -> KVLayout:
        """Of this rank's own pool."""
        whole, heads = self.cut.layout, len(self.heads)
        parts = tuple(replace(part, heads=heads) for part in whole.parts)
        return replace(whole, num_layers=len(self.layers), kv_heads=heads, parts=parts)

    @property
    def seat(self) -> tuple[int, int, int, int]:
        """(tp, pp, stage, rank): what names this shard to those who know the model."""
        return self.cut.tp, self.cut.pp, self.stage, self.rank

    def seated(self, seat: tuple[int, int, int, int]) -> Shard:
        """The shard of that seat of this model. Raises ConfigError for a cut that cannot be."""
        tp, pp, stage, rank = seat
        return Shard(replace(self.cut, tp=tp, pp=pp), stage, rank)

    def window(self, layers: range, heads: range) -> Window:
        """Where these layers and heads of the whole model lie in a block of this shard."""
        parts, head_bytes = len(self.cut.layout.parts), self.cut.layout.head_dim * self.cut.layout.dtype_bytes
        return Window(
            (layers.start - self.layers.start) * parts,
            len(layers) * parts,
            (heads.start - self.heads.start) * head_bytes,
            len(heads) * head_bytes,
        )


@dataclass(frozen=True)
class Route:
    """Bytes of each block that go from one shard to another."""

    source: Shard
    target: Shard
    layers: range
    heads: range

    @property
    def windows(self) -> tuple[Window, Window]:
        """At the source and at the target."""
        return self.source.window(self.layers, self.heads), self.target.window(self.layers, self.heads)

    @cached_property
    def is_whole(self) -> bool:
        """Both ends hold just these layers and heads: blocks move as they are."""
        return all((end.layers, end.heads) == (self.layers, self.heads) for end in (self.source, self.target))

    @property
    def source_layers(self) -> range:
        """Its layers as the source shard counts its own."""
        first = self.source.layers.start
        return range(self.layers.start - first, self.layers.stop - first)

    def within(self, layers: range) -> Route | None:
        """The part of it in these layers, counted from the source shard's first; None when there is none."""
        first = self.source.layers.start
        both = _overlap(range(first + layers.start, first + layers.stop), self.layers)
        return replace(self, layers=both) if len(both) else None

    @property
    def block_bytes(self) -> int:
        layout = self.source.cut.layout
        tokens = len(self.layers) * len(layout.parts) * layout.block_tokens
        return tokens * len(self.heads) * layout.head_dim * layout.dtype_bytes


def plan(source: Cut, target: Cut) -> tuple[Route, ...]:
    """The routes that fill all shards of `target` from those of `source`, load spread over ranks that hold the same.

    Orders may differ. Raises LayoutMismatch when the two cut different models. Cost O(shards of both, multiplied).
    """
    return tuple(route for shard in target.shards for route in routes_into(source, shard))


def routes_into(source: Cut, target: Shard) -> tuple[Route, ...]:
    """The routes of plan() that fill one shard. Raises LayoutMismatch."""
    ours, theirs = source.layout.fingerprint(), target.cut.layout.fingerprint()
    if ours != theirs:
        raise LayoutMismatch(f"{ours} cannot be cut into {theirs}: not the same KV", ours=ours, theirs=theirs)
    routes = []
    for stage in range(source.pp):
        row = source.shards[stage * source.tp : (stage + 1) * source.tp]
        layers = _overlap(row[0].layers, target.layers)
        if len(layers):
            routes += [Route(holder, target, layers, heads) for holder, heads in _holders(row, target)]
    return tuple(routes)


def route_between(source: Shard, target: Shard) -> Route | None:
    """What `source` sends to `target`; None when others send all that it needs. Raises LayoutMismatch."""
    return next((route for route in routes_into(source.cut, target) if route.source == source), None)


def _holders(row: Iterable[Shard], target: Shard) -> list[tuple[Shard, range]]:
    """One source rank for each run of heads that `target` needs; of equal holders, by the target's rank."""
    by_heads: dict[range, list[Shard]] = {}
    for shard in row:
        by_heads.setdefault(shard.heads, []).append(shard)
    chosen = []
    for held, holders in by_heads.items():
        heads = _overlap(held, target.heads)
        if len(heads):
            chosen.append((holders[target.rank % len(holders)], heads))
    return chosen


def _overlap(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))
