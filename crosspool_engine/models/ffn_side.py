"""From a loaded model's `mlp` modules to the native weights pool side. Source: CrossPool (weights pool side)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from poolweave.crosspool_engine._native import FfnStack
from poolweave.crosspool_engine.ffn_placement import FfnPart
from poolweave.crosspool_engine.models.arrays import as_matrix, as_vector, linear
from poolweave.errors import ConfigError

Sizes = dict[str, Any]


def build_ffn_stack(
    mlps: Sequence[Any], config: Any, part: FfnPart | None = None, *, kernels: str = "auto"
) -> FfnStack:
    """The native FFN of the layers whose `mlp` modules are given, in their order; `config` is the model's.

    `part`: what a rank has of them; None is all. Weights are borrowed from the modules, only chosen experts copied.
    Raises ConfigError, naming what, for an activation other than SiLU, an unknown architecture, and weights that are
    missing, misshapen or not finite.
    """
    if config.hidden_act != "silu":
        raise ConfigError(
            f"hidden_act {config.hidden_act!r} is not decoded here, only 'silu'", setting="hidden_act",
            value=config.hidden_act,
        )  # fmt: skip
    stack = FfnStack(config.hidden_size, kernels)
    for number, mlp in enumerate(mlps):
        try:
            _add(stack, mlp, config, part or FfnPart(()))
        except ConfigError as error:
            raise ConfigError(f"FFN {number}: {error}", setting=error.setting, value=error.value) from error
    return stack


def _add(stack: FfnStack, mlp: Any, config: Any, part: FfnPart) -> None:
    weights: dict[str, Any] = {}
    if not hasattr(mlp, "experts"):
        for key in ("gate", "up", "down"):
            linear(weights, key, f"{key}_proj", getattr(mlp, f"{key}_proj"))
        stack.add_dense(weights)
        return
    sizes = _ROUTINGS.get(config.model_type)
    if sizes is None:
        raise ConfigError(
            f"no gate is known for {config.model_type!r}: {sorted(_ROUTINGS)}", setting="model_type",
            value=config.model_type,
        )  # fmt: skip
    weights["router"] = as_matrix("gate.weight", mlp.gate.weight)
    weights["choice_bias"] = as_vector("e_score_correction_bias", getattr(mlp.gate, "e_score_correction_bias", None))
    count = len(mlp.experts.down_proj)
    for key, name in (("gate_up", "gate_up_proj"), ("experts_down", "down_proj")):
        every = getattr(mlp.experts, name)
        weights[key] = as_matrix(f"experts.{name}", every if part.experts is None else every[list(part.experts)])
    if part.unrouted and hasattr(mlp, "shared_experts"):
        for key in ("gate", "up", "down"):
            linear(weights, f"shared_{key}", f"shared_experts.{key}_proj", getattr(mlp.shared_experts, f"{key}_proj"))
    chosen = range(count) if part.experts is None else part.experts
    here = {expert: place for place, expert in enumerate(chosen)}
    common = {
        "experts": count, "places": [here.get(expert, -1) for expert in range(count)],
        "top_k": config.num_experts_per_tok, "sigmoid": False, "normalise": False, "scale": 1.0, "groups": 1,
        "top_groups": 1, "sum_top_two": False,
    }  # fmt: skip
    stack.add_moe(weights, common | sizes(config))


def _mixtral(config: Any) -> Sizes:
    return {"normalise": True}


def _qwen3_moe(config: Any) -> Sizes:
    return {"normalise": bool(config.norm_topk_prob)}


def _deepseek_v2(config: Any) -> Sizes:
    """transformers scales without normalising, whatever `norm_topk_prob` says; so do we."""
    sizes: Sizes = {"scale": float(config.routed_scaling_factor)}
    if config.topk_method == "group_limited_greedy":
        sizes |= {"groups": config.n_group, "top_groups": config.topk_group}
    elif config.topk_method != "greedy":
        raise ConfigError(
            f"topk_method {config.topk_method!r} is neither 'greedy' nor 'group_limited_greedy'",
            setting="topk_method", value=config.topk_method,
        )  # fmt: skip
    return sizes


def _glm4_moe_lite(config: Any) -> Sizes:
    return {
        "sigmoid": True, "normalise": bool(config.norm_topk_prob), "scale": float(config.routed_scaling_factor),
        "groups": config.n_group, "top_groups": config.topk_group, "sum_top_two": True,
    }  # fmt: skip


_ROUTINGS: Mapping[str, Callable[[Any], Sizes]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "glm4_moe_lite": _glm4_moe_lite,
}
