"""The operators of one model on one device, fitted: an operator-level cost model as a file keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from poolweave.scheduler.cost_model import DecodeStep
from poolweave.scheduler.operators import (
    AttentionOperator,
    CollectiveOperator,
    HopOperator,
    LinearOperator,
    Operator,
    OperatorModel,
    Parallelism,
    WaveOperator,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """By name, as measured at TP 1; `collectives` and `hops` between two ranks on this machine."""

    gemms: Mapping[str, WaveOperator] = field(default_factory=dict)
    attention: Mapping[str, AttentionOperator] = field(default_factory=dict)
    others: Mapping[str, LinearOperator] = field(default_factory=dict)
    collectives: Mapping[str, CollectiveOperator] = field(default_factory=dict)  # of tensor parallel ranks
    hops: Mapping[str, HopOperator] = field(default_factory=dict)  # from a pipeline stage to the next

    def __iter__(self) -> Iterator[Operator]:
        yield from self.gemms.values()
        yield from self.attention.values()
        yield from self.others.values()
        yield from self.collectives.values()
        yield from self.hops.values()

    def computed(self) -> Operators:
        """Without what ranks send each other: the share of one rank alone."""
        return replace(self, collectives={}, hops={})

    def model(self, parallelism: Parallelism | None = None, decode: DecodeStep | None = None) -> OperatorModel:
        """Their sum, for that parallelism (default: none). `decode` is taken as it is."""
        return OperatorModel(operators=tuple(self), parallelism=parallelism or Parallelism(), decode=decode)
