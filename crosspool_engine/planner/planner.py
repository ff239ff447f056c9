"""From workloads and devices to a plan: the fewest KV ranks whose pool holds the demand, the rest for weights.

Pure: the same request gives the same plan on every machine. Source: CrossPool planner, Table 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from poolweave.crosspool_engine.model_shape import ModelShape
from poolweave.crosspool_engine.planner.attention import (
    AttentionLayout,
    AttentionNeed,
    AttentionPlace,
    lay_out_attention,
)
from poolweave.crosspool_engine.planner.demand import DemandEstimate, Sampling, Workload, estimate_demand
from poolweave.crosspool_engine.planner.placement import Units, place_units
from poolweave.crosspool_engine.planner.plan import VERSION, FfnPiece, ModelPlan, Plan, Split
from poolweave.errors import ConfigError, PlanInfeasible

DEFAULT_PAGE_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One of `count` equal devices. `reserve` is the part of its memory kept for activations and code."""

    count: int
    memory_bytes: int
    bandwidth_bytes_per_s: float
    reserve: float = 0.1

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ConfigError(
                f"two pools need at least 2 devices, got {self.count}", setting="count", value=self.count, limit=2
            )
        if self.memory_bytes <= 0 or self.bandwidth_bytes_per_s <= 0 or not 0 <= self.reserve < 1:
            raise ConfigError(
                "a device has positive memory and bandwidth and a reserve in [0, 1)", setting="memory_bytes",
                value=self.memory_bytes,
            )  # fmt: skip

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * (1 - self.reserve))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """All that a plan depends on."""

    workloads: tuple[Workload, ...]
    device: Device
    sampling: Sampling = field(default_factory=Sampling)
    split: Split = "layer"
    page_bytes: int = DEFAULT_PAGE_BYTES
    block_tokens: int = 16
    dtype_bytes: int = 2

    def __post_init__(self) -> None:
        names = [workload.name for workload in self.workloads]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"workloads need names of their own, got {names}", setting="workloads", value=names)
        if self.split not in ("layer", "expert"):
            raise ConfigError(f"split {self.split!r} is neither 'layer' nor 'expert'", setting="split")
        for name in ("page_bytes", "block_tokens", "dtype_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive", setting=name, value=getattr(self, name))


def make_plan(request: PlanRequest) -> Plan:
    """The plan with the fewest KV ranks that fits, hence with the pool least cut up.

    The budget is the upper end of the percentile's interval, at least the largest request of any trace, in whole
    pages plus one a model and rank for its range's last page. Raises PlanInfeasible with the numbers of the split
    of devices that came closest to fitting.
    """
    demand = estimate_demand(
        request.workloads, request.sampling, block_tokens=request.block_tokens, dtype_bytes=request.dtype_bytes
    )
    refusals: list[PlanInfeasible] = []
    for kv_ranks in range(1, request.device.count):
        try:
            return _plan_with(request, demand, kv_ranks)
        except PlanInfeasible as refusal:
            refusals.append(refusal)
    raise min(refusals, key=lambda refusal: float(refusal.needed_bytes) - float(refusal.available_bytes))


def _plan_with(request: PlanRequest, demand: DemandEstimate, kv_ranks: int) -> Plan:
    attention = _attention(request, demand, kv_ranks)
    weights_ranks = tuple(range(kv_ranks, request.device.count))
    ffn = _place_ffn(request, weights_ranks)
    pages = tuple(math.ceil(wanted / request.page_bytes) + len(request.workloads) for wanted in attention.kv_demand)
    for rank, (budget, free) in enumerate(zip(pages, attention.kv_capacity, strict=True)):
        if budget * request.page_bytes > free:
            raise PlanInfeasible(
                f"KV rank {rank} needs {budget} pages of {request.page_bytes:,} bytes, {free:,} bytes are left",
                part="kv", needed_bytes=budget * request.page_bytes, available_bytes=free,
            )  # fmt: skip
    return Plan(
        version=VERSION, page_bytes=request.page_bytes, block_tokens=request.block_tokens,
        dtype_bytes=request.dtype_bytes, split=request.split, kv_ranks=tuple(range(kv_ranks)),
        weights_ranks=weights_ranks, pages_per_rank=pages, percentile=request.sampling.percentile,
        confidence=request.sampling.confidence, percentile_bytes=round(demand.percentile_bytes),
        low_bytes=round(demand.low_bytes), high_bytes=round(demand.high_bytes), mean_bytes=round(demand.mean_bytes),
        little_bytes=round(demand.little_bytes),
        models=tuple(
            _model_plan(request, workload, own, place, pieces)
            for workload, own, place, pieces in zip(
                request.workloads, demand.model_bytes, attention.places, ffn, strict=True
            )
        ),
    )  # fmt: skip


def _attention(request: PlanRequest, demand: DemandEstimate, kv_ranks: int) -> AttentionLayout:
    needs = [
        AttentionNeed(
            name=workload.name,
            kv_shards=workload.shape.attention.kv_shards,
            resident_bytes=workload.shape.resident_params * request.dtype_bytes,
            own_bytes=math.ceil(own),
            largest_request_bytes=_largest_request(request, workload),
            ends_bytes=(workload.shape.embedding_params + workload.shape.hidden) * request.dtype_bytes,
        )
        for workload, own in zip(request.workloads, demand.model_bytes, strict=True)
    ]
    total = max(math.ceil(demand.high_bytes), *(need.largest_request_bytes for need in needs))
    return lay_out_attention(needs, ranks=kv_ranks, capacity_bytes=request.device.usable_bytes, total_bytes=total)


def _largest_request(request: PlanRequest, workload: Workload) -> int:
    tokens = int((workload.trace.prompt_tokens + workload.trace.output_tokens).max())
    blocks = math.ceil(tokens / request.block_tokens)
    return blocks * request.block_tokens * workload.shape.kv_bytes_per_token(request.dtype_bytes)


def _layer_s(request: PlanRequest, shape: ModelShape) -> float:
    """Mean time of one FFN layer at batch 1: the bytes it reads at the device's bandwidth."""
    params = sum(shape.active_ffn_params(layer) for layer in range(shape.num_layers)) / shape.num_layers
    return params * request.dtype_bytes / request.device.bandwidth_bytes_per_s


def _model_plan(
    request: PlanRequest, workload: Workload, own: float, place: AttentionPlace, pieces: tuple[FfnPiece, ...]
) -> ModelPlan:
    shape = workload.shape
    return ModelPlan(
        name=workload.name, architecture=shape.architecture, num_layers=shape.num_layers,
        dense_layers=shape.dense_layers, num_experts=shape.experts.num if shape.experts else 0,
        kv_bytes_per_token=shape.kv_bytes_per_token(request.dtype_bytes), attention_ranks=place.replicas,
        pool_share=place.pool_share, percentile_pages=math.ceil(own / request.page_bytes),
        largest_request_pages=math.ceil(_largest_request(request, workload) / request.page_bytes),
        ffn_layer_s=_layer_s(request, shape), ffn=pieces,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Kind:
    """Units of one model and what each of them is: a layer, an expert of all MoE layers, or all that is unrouted."""

    units: Units
    members: tuple[int, ...]


def _place_ffn(request: PlanRequest, ranks: Sequence[int]) -> list[tuple[FfnPiece, ...]]:
    kinds = [kind for workload in request.workloads for kind in _kinds(request, workload)]
    times = {workload.name: _layer_s(request, workload.shape) for workload in request.workloads}
    counts = place_units(
        [kind.units for kind in kinds], times, ranks=len(ranks), capacity_bytes=request.device.usable_bytes
    )
    pieces: dict[str, list[FfnPiece]] = {workload.name: [] for workload in request.workloads}
    shapes = {workload.name: workload.shape for workload in request.workloads}
    for kind, row in zip(kinds, counts, strict=True):
        first = 0
        for rank, count in zip(ranks, row, strict=True):
            if count:
                members = kind.members[first : first + count]
                pieces[kind.units.model].append(_piece(kind, shapes[kind.units.model], rank, members))
            first += count
    return [tuple(pieces[workload.name]) for workload in request.workloads]


def _piece(kind: _Kind, shape: ModelShape, rank: int, members: tuple[int, ...]) -> FfnPiece:
    nbytes = len(members) * kind.units.nbytes
    if kind.units.kind in ("moe", "dense"):
        return FfnPiece(rank=rank, layers=members, experts=None, nbytes=nbytes)
    if kind.units.kind == "expert":
        layers = tuple(n for n in range(shape.num_layers) if not shape.is_dense(n))
        return FfnPiece(rank=rank, layers=layers, experts=members, nbytes=nbytes)
    return FfnPiece(rank=rank, layers=tuple(range(shape.num_layers)), experts=(), nbytes=nbytes)


def _kinds(request: PlanRequest, workload: Workload) -> list[_Kind]:
    shape, size = workload.shape, request.dtype_bytes
    layers = range(shape.num_layers)
    moe = tuple(n for n in layers if not shape.is_dense(n))
    if request.split == "expert" and shape.experts is not None and moe:
        expert_bytes = len(moe) * shape.expert_params * size
        rest = shape.ffn_params * size - shape.experts.num * expert_bytes
        return [
            _Kind(Units(workload.name, "expert", shape.experts.num, expert_bytes), tuple(range(shape.experts.num))),
            _Kind(Units(workload.name, "unrouted", 1, rest), (0,)),
        ]
    dense = tuple(n for n in layers if shape.is_dense(n))
    return [
        _Kind(Units(workload.name, kind, len(members), shape.layer_ffn_params(members[0]) * size), members)
        for kind, members in (("dense", dense), ("moe", moe))
        if members
    ]
