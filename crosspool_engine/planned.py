"""A plan file as an engine enforces it: its pages, its ranks, its models and where each of them lies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from poolweave.crosspool_engine.config import EngineConfig
from poolweave.crosspool_engine.ffn_placement import FfnPlacement
from poolweave.crosspool_engine.model_shape import ModelShape
from poolweave.crosspool_engine.planner.plan import Plan
from poolweave.crosspool_engine.served_model import Serving
from poolweave.errors import ConfigError, PlanInfeasible

_DTYPES = {4: "float32", 2: "bfloat16"}


def planned_config(plan: Plan, **settings: Any) -> EngineConfig:
    """The plan's ranks and page budgets; `settings` are EngineConfig's others.

    Raises ConfigError for a setting that the plan makes.
    """
    planned: dict[str, Any] = {
        "kv_budget": tuple(pages * plan.page_bytes for pages in plan.pages_per_rank),
        "page_bytes": plan.page_bytes, "block_tokens": plan.block_tokens, "attention_ranks": len(plan.kv_ranks),
        "ffn_ranks": len(plan.weights_ranks), "max_models": len(plan.models),
    }  # fmt: skip
    taken = sorted(planned.keys() & settings)
    if taken:
        raise ConfigError(f"the plan says {taken[0]}: leave it out", setting=taken[0], value=settings[taken[0]])
    return EngineConfig(**planned, **settings)


def check_machine(
    plan: Plan, shapes: Mapping[str, ModelShape], *, away: int = 0, memory_bytes: int | None = None
) -> None:
    """Raises PlanInfeasible with the bytes when this machine cannot hold what the plan puts on it.

    `shapes` of the planned models by name; `away`: how many weights ranks, the last ones, are other hosts'.
    `memory_bytes`: None is all memory of the machine.
    """
    here = plan.weights_ranks[: len(plan.weights_ranks) - away]
    kv = plan.total_pages * plan.page_bytes
    ffn = sum(plan.rank_ffn_bytes(rank) for rank in here)
    beside = sum(
        len(model.attention_ranks) * shapes[model.name].resident_params * plan.dtype_bytes
        for model in plan.models if model.name in shapes
    )  # fmt: skip
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if memory_bytes is None else memory_bytes
    needed = kv + ffn + beside
    if needed > have:
        raise PlanInfeasible(
            f"the plan needs {needed:,} bytes on this machine ({kv:,} of KV, {ffn:,} of FFN weights, {beside:,} of "
            f"others), it has {have:,}: plan with smaller devices, or put FFN ranks on other hosts (ffn_hosts)",
            part="kv" if kv > have else "weights", needed_bytes=needed, available_bytes=have,
        )  # fmt: skip


def planned_serving(plan: Plan, name: str, serving: Serving) -> Serving:
    """`serving` where the plan places the model.

    Raises ConfigError for a model that is not in the plan or is another one than was planned, or a placement of
    one's own.
    """
    shape = ModelShape.from_directory(serving.path)
    placement = FfnPlacement.of_plan(plan, name, shape)
    model = next(each for each in plan.models if each.name == name)
    kappa, dtype = shape.kv_bytes_per_token(plan.dtype_bytes), _DTYPES[plan.dtype_bytes]
    if model.kv_bytes_per_token != kappa or serving.dtype != dtype:
        raise ConfigError(
            f"the plan's {name!r} has {model.kv_bytes_per_token} KV bytes a token in {dtype}, this one {kappa} in "
            f"{serving.dtype}", setting="plan",
        )  # fmt: skip
    if serving.placement is not None or serving.replicas is not None:
        raise ConfigError(f"the plan places {name!r}: leave placement and replicas out", setting="placement")
    replicas = tuple(tuple(plan.kv_ranks.index(rank) for rank in ranks) for ranks in model.attention_ranks)
    return replace(serving, placement=placement, replicas=replicas)
