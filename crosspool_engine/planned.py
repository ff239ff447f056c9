"""A plan file as an engine enforces it: its pages, its ranks, its models and where each of them lies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from poolweave.crosspool_engine.config import EngineConfig
from poolweave.crosspool_engine.ffn_placement import FfnPlacement
from poolweave.crosspool_engine.model_shape import ModelShape
from poolweave.crosspool_engine.planner.plan import Plan
from poolweave.crosspool_engine.served_model import Serving
from poolweave.errors import ConfigError

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


def planned_serving(plan: Plan, name: str, serving: Serving) -> Serving:
    """`serving` where the plan places the model.

    Raises ConfigError for a model that is not in the plan or is another one than was planned, a placement of one's
    own, and attention that the plan spreads over several ranks (tensor parallel), which is not decoded here.
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
    wide = [replica for replica in model.attention_ranks if len(replica) > 1]
    if wide:
        raise ConfigError(
            f"the plan spreads attention of {name!r} over ranks {list(wide[0])}; it is decoded on one rank each: plan "
            "with devices that hold the demand on fewer KV ranks", setting="plan",
        )  # fmt: skip
    if serving.placement is not None or serving.ranks is not None:
        raise ConfigError(f"the plan places {name!r}: leave placement and ranks out", setting="placement")
    ranks = tuple(plan.kv_ranks.index(replica[0]) for replica in model.attention_ranks)
    return replace(serving, placement=placement, ranks=ranks)
