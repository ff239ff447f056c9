"""From a checkpoint to the native weights pool side: layers' FFNs, or some experts of each. Source: CrossPool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from poolweave.crosspool_engine._native import FfnStack, WeightStore
from poolweave.crosspool_engine.ffn_placement import FfnPart
from poolweave.crosspool_engine.models.checkpoint import Checkpoint
from poolweave.errors import ConfigError

Sizes = dict[str, Any]
_DENSE = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = ("w1", "w3", "w2")  # the same three, as its checkpoints call them
_EXACT_GATES = ("deepseek_v2", "glm4_moe_lite")  # transformers keeps their routers in float32


def build_ffn_stack(checkpoint: Checkpoint, part: FfnPart | None = None, *, kernels: str = "auto") -> FfnStack:
    """The native FFN of the layers of `part`, in their order; None is all. Nothing else is read.

    Weights are packed one by one as they are read: beside them at most one tensor lies in memory. Raises ConfigError,
    naming what, for an activation other than SiLU and for weights that are missing, misshapen or not finite.
    """
    shape, config = checkpoint.shape, checkpoint.config
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise ConfigError(f"hidden_act {act!r} is not decoded here, only 'silu'", setting="hidden_act", value=act)
    part = part or FfnPart(tuple(range(shape.num_layers)))
    stack = FfnStack(shape.hidden, kernels)
    builder = _Builder(checkpoint, part, WeightStore())
    for layer in part.layers:
        if shape.is_dense(layer):
            stack.add_dense(builder.ffn("", f"model.layers.{layer}.mlp.", shape.dense_intermediate))
        else:
            stack.add_moe(builder.mixture(layer), builder.sizes())
    return stack


@dataclass(frozen=True, slots=True)
class _Builder:
    checkpoint: Checkpoint
    part: FfnPart
    store: WeightStore

    def ffn(self, key: str, prefix: str, width: int) -> dict[str, Any]:
        """A gated FFN under names that begin with `key`."""
        hidden = self.checkpoint.shape.hidden
        weights: dict[str, Any] = {}
        for name, rows, cols in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
            matrix = self.checkpoint.matrix(f"{prefix}{name}_proj.weight", (rows, cols))
            weights[key + name] = self.store.pack(matrix)
            if self.checkpoint.shape.dense_bias:
                weights[f"{key}{name}_bias"] = self.checkpoint.vector(f"{prefix}{name}_proj.bias", rows)
        return weights

    def mixture(self, layer: int) -> dict[str, Any]:
        shape = self.checkpoint.shape
        assert shape.experts is not None
        prefix = f"model.layers.{layer}.mlp."
        if shape.architecture == "mixtral" and prefix + "gate.weight" not in self.checkpoint:
            prefix = f"model.layers.{layer}.block_sparse_moe."  # what its own checkpoints call it
        router, exact = prefix + "gate.weight", shape.architecture in _EXACT_GATES
        weights: dict[str, Any] = {
            "router": self.store.pack(self.checkpoint.matrix(router, (shape.experts.num, shape.hidden), wide=exact))
        }
        bias = prefix + "gate.e_score_correction_bias"
        if shape.architecture == "glm4_moe_lite":
            weights["choice_bias"] = self.checkpoint.vector(bias, shape.experts.num, exact=True)
        if self.part.unrouted and shape.experts.shared_intermediate:
            weights |= self.ffn("shared_", prefix + "shared_experts.", shape.experts.shared_intermediate)
        pairs = [self._expert(prefix + "experts.", expert) for expert in self._chosen]
        return weights | {"gate_up": [pair[0] for pair in pairs], "experts_down": [pair[1] for pair in pairs]}

    def _expert(self, prefix: str, expert: int) -> tuple[Any, Any]:
        """Packed gate and up, and down, of one expert: of its own tensors, or its share of all experts' in one."""
        shape = self.checkpoint.shape
        assert shape.experts is not None
        width, hidden, one = shape.experts.intermediate, shape.hidden, range(expert, expert + 1)
        if prefix + "gate_up_proj" in self.checkpoint:
            wide, deep = (shape.experts.num, 2 * width, hidden), (shape.experts.num, hidden, width)
            gate_up = self.checkpoint.matrix(prefix + "gate_up_proj", wide, rows=one)
            return self.store.pack(gate_up), self.store.pack(
                self.checkpoint.matrix(prefix + "down_proj", deep, rows=one)
            )
        gate, up, down = _MIXTRAL if shape.architecture == "mixtral" else _DENSE
        halves = [self.checkpoint.matrix(f"{prefix}{expert}.{name}.weight", (width, hidden)) for name in (gate, up)]
        return self.store.pack(np.concatenate(halves)), self.store.pack(
            self.checkpoint.matrix(f"{prefix}{expert}.{down}.weight", (hidden, width))
        )

    @property
    def _chosen(self) -> tuple[int, ...]:
        experts = self.checkpoint.shape.experts
        assert experts is not None
        return tuple(range(experts.num)) if self.part.experts is None else self.part.experts

    def sizes(self) -> Sizes:
        experts, config = self.checkpoint.shape.experts, self.checkpoint.config
        assert experts is not None
        here = {expert: place for place, expert in enumerate(self._chosen)}
        return {
            "experts": experts.num, "places": [here.get(expert, -1) for expert in range(experts.num)],
            "top_k": experts.top_k, "sigmoid": False, "normalise": False, "scale": 1.0, "groups": 1, "top_groups": 1,
            "sum_top_two": False, **_ROUTINGS[self.checkpoint.shape.architecture](config),
        }  # fmt: skip


def _mixtral(config: Sizes) -> Sizes:
    return {"normalise": True}


def _qwen3_moe(config: Sizes) -> Sizes:
    return {"normalise": bool(config.get("norm_topk_prob", False))}


def _deepseek_v2(config: Sizes) -> Sizes:
    """transformers scales without normalising, whatever `norm_topk_prob` says; so do we."""
    sizes: Sizes = {"scale": float(config.get("routed_scaling_factor", 1.0))}
    method = config.get("topk_method", "greedy")
    if method == "group_limited_greedy":
        sizes |= {"groups": config["n_group"], "top_groups": config["topk_group"]}
    elif method != "greedy":
        raise ConfigError(
            f"topk_method {method!r} is neither 'greedy' nor 'group_limited_greedy'", setting="topk_method",
            value=method,
        )  # fmt: skip
    return sizes


def _glm4_moe_lite(config: Sizes) -> Sizes:
    return {
        "sigmoid": True, "normalise": bool(config.get("norm_topk_prob", True)),
        "scale": float(config.get("routed_scaling_factor", 1.8)), "groups": config.get("n_group", 1),
        "top_groups": config.get("topk_group", 1), "sum_top_two": True,
    }  # fmt: skip


_ROUTINGS: Mapping[str, Callable[[Sizes], Sizes]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "glm4_moe_lite": _glm4_moe_lite,
}
