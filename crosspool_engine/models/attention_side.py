"""From a checkpoint to the native KV side: everything but the FFN, or one rank's heads of that. Source: CrossPool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from poolweave.crosspool_engine._native import AttentionStack, WeightStore
from poolweave.crosspool_engine.attention_shape import GroupedAttention, LatentAttention
from poolweave.crosspool_engine.head_shard import WHOLE, HeadShard
from poolweave.crosspool_engine.models.checkpoint import Checkpoint
from poolweave.crosspool_engine.models.rope import Rope, read_rope
from poolweave.errors import ConfigError

_EPS = {"mixtral": 1e-5, "glm4_moe_lite": 1e-5}  # transformers' default where a config names none
_LATENT_EPS = 1e-6  # of MLA's own norms, whatever the config says


def build_attention_stack(checkpoint: Checkpoint, shard: HeadShard = WHOLE, *, kernels: str = "auto") -> AttentionStack:
    """The native KV side of a model, or `shard` of it. No byte of an FFN is read.

    Weights are packed one by one as they are read: beside them at most one tensor lies in memory. Raises ConfigError,
    naming what, for features that are not decoded natively (sliding windows, length-dependent rope), for weights that
    are missing, misshapen or not finite, and for heads that do not divide.
    """
    return _Builder(checkpoint, shard, WeightStore()).build(kernels)


@dataclass(frozen=True, slots=True)
class _Builder:
    checkpoint: Checkpoint
    shard: HeadShard
    store: WeightStore

    def build(self, kernels: str) -> AttentionStack:
        shape, config = self.checkpoint.shape, self.checkpoint.config
        _check_window(config)
        self.shard.check(shape.attention)
        grouped = isinstance(shape.attention, GroupedAttention)
        dim = shape.attention.head_dim if isinstance(shape.attention, GroupedAttention) else shape.attention.rope
        rope = read_rope(config, dim)
        stack = AttentionStack(shape.hidden, self._ends(), list(rope.inv_freq), rope.scale, rope.form, kernels)
        for layer in range(shape.num_layers):
            prefix = f"model.layers.{layer}."
            weights = self._norms(prefix)
            if grouped:
                stack.add_grouped(weights, self._grouped(weights, prefix + "self_attn."))
            else:
                stack.add_latent(weights, self._latent(weights, prefix + "self_attn.", rope))
        return stack

    def _ends(self) -> dict[str, Any]:
        """Embedding, last norm and head, on the first rank only."""
        if not self.shard.first:
            return {}
        shape = self.checkpoint.shape
        ends: dict[str, Any] = {}
        self._matrix(ends, "embedding", "model.embed_tokens.weight", shape.vocab, shape.hidden)
        if shape.tied:
            ends["head"] = ends["embedding"]
        else:
            self._matrix(ends, "head", "lm_head.weight", shape.vocab, shape.hidden)
        self._norm(ends, "norm", "model.norm.weight", shape.hidden)
        return ends

    def _norms(self, prefix: str) -> dict[str, Any]:
        weights: dict[str, Any] = {}
        self._norm(weights, "input_norm", prefix + "input_layernorm.weight", self.checkpoint.shape.hidden)
        self._norm(weights, "post_norm", prefix + "post_attention_layernorm.weight", self.checkpoint.shape.hidden)
        return weights

    def _grouped(self, weights: dict[str, Any], prefix: str) -> dict[str, Any]:
        attention, hidden = self.checkpoint.shape.attention, self.checkpoint.shape.hidden
        assert isinstance(attention, GroupedAttention)
        dim = attention.head_dim
        for key, heads in (("q", attention.heads), ("k", attention.kv_heads), ("v", attention.kv_heads)):
            rows = self.shard.rows(heads, dim)
            self._matrix(weights, key, f"{prefix}{key}_proj.weight", heads * dim, hidden, rows)
            if attention.bias:
                weights[f"{key}_bias"] = self.checkpoint.vector(f"{prefix}{key}_proj.bias", heads * dim, rows=rows)
        self._output(weights, prefix, attention.heads * dim, self.shard.rows(attention.heads, dim))
        if attention.head_norms:
            for key in ("q_norm", "k_norm"):
                self._norm(weights, key, f"{prefix}{key}.weight", dim)
        return {
            "heads": attention.heads // self.shard.width, "kv_heads": attention.kv_heads // self.shard.width,
            "head_dim": dim, "scale": dim**-0.5,
        }  # fmt: skip

    def _latent(self, weights: dict[str, Any], prefix: str, rope: Rope) -> dict[str, Any]:
        attention, hidden = self.checkpoint.shape.attention, self.checkpoint.shape.hidden
        assert isinstance(attention, LatentAttention)
        head = attention.nope + attention.rope
        if attention.q_rank is None:
            self._matrix(weights, "q_b", prefix + "q_proj.weight", attention.heads * head, hidden)
        else:
            self._latent_linear(weights, "q_a", prefix + "q_a_proj", attention.q_rank, hidden)
            self._norm(weights, "q_a_norm", prefix + "q_a_layernorm.weight", attention.q_rank, _LATENT_EPS)
            self._matrix(weights, "q_b", prefix + "q_b_proj.weight", attention.heads * head, attention.q_rank)
        width = attention.kv_rank + attention.rope
        self._latent_linear(weights, "kv_a", prefix + "kv_a_proj_with_mqa", width, hidden)
        self._norm(weights, "kv_a_norm", prefix + "kv_a_layernorm.weight", attention.kv_rank, _LATENT_EPS)
        expand = attention.heads * (attention.nope + attention.v_dim), attention.kv_rank
        weights["expand"] = self.checkpoint.matrix(prefix + "kv_b_proj.weight", expand)
        self._latent_linear(weights, "o", prefix + "o_proj", hidden, attention.heads * attention.v_dim)
        return {
            "heads": attention.heads, "rank": attention.kv_rank, "nope": attention.nope, "rope": attention.rope,
            "v_dim": attention.v_dim, "scale": head**-0.5 * rope.latent_scale,
        }  # fmt: skip

    def _output(self, weights: dict[str, Any], prefix: str, width: int, columns: range) -> None:
        """The output projection's columns of this rank's heads; its bias is added once, by the first rank."""
        hidden = self.checkpoint.shape.hidden
        whole = self.checkpoint.matrix(prefix + "o_proj.weight", (hidden, width))
        weights["o"] = self.store.pack(np.ascontiguousarray(whole[:, columns.start : columns.stop]))
        if self.checkpoint.shape.attention.bias and self.shard.first:
            weights["o_bias"] = self.checkpoint.vector(prefix + "o_proj.bias", hidden)

    def _matrix(
        self, into: dict[str, Any], key: str, name: str, height: int, width: int, rows: range | None = None
    ) -> None:
        into[key] = self.store.pack(self.checkpoint.matrix(name, (height, width), rows=rows))

    def _latent_linear(self, into: dict[str, Any], key: str, name: str, height: int, width: int) -> None:
        """Of MLA's projections only these have a bias, if any."""
        self._matrix(into, key, name + ".weight", height, width)
        if self.checkpoint.shape.attention.bias:
            into[f"{key}_bias"] = self.checkpoint.vector(name + ".bias", height)

    def _norm(self, into: dict[str, Any], key: str, name: str, size: int, eps: float | None = None) -> None:
        config = self.checkpoint.config
        into[key] = self.checkpoint.vector(name, size)
        default = _EPS.get(config["model_type"], 1e-6)
        into[f"{key}_eps"] = float(config.get("rms_norm_eps", default)) if eps is None else eps


def _check_window(config: dict[str, Any]) -> None:
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window", True):
        raise ConfigError(f"sliding_window {window} is not decoded here", setting="sliding_window", value=window)
