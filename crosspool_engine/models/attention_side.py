"""From a loaded model's modules to the native KV side: everything but the FFN. Source: CrossPool (KV pool side)."""

from __future__ import annotations

from typing import Any

import torch

from poolweave.crosspool_engine._native import AttentionStack
from poolweave.crosspool_engine.models.arrays import as_matrix, linear, norm
from poolweave.errors import ConfigError

# How a family stores rotated keys: see csrc/core/decode/rope.hpp.
_HALVES, _INTERLEAVED, _INTERLEAVED_TO_HALVES = 0, 1, 2
_ROPES = ("default", "linear", "yarn", "llama3")  # fixed frequencies; others change with the length


def build_attention_stack(model: Any, *, kernels: str = "auto") -> AttentionStack:
    """The native KV side of `model`, a CausalLM of transformers (its `mlp` modules are not looked at).

    Weights are borrowed from the modules, not copied. Raises ConfigError, naming what, for features that are not
    decoded natively (sliding windows, length-dependent rope) and for weights that are missing, misshapen or not finite.
    """
    config, body = model.config, model.model
    _check_features(config)
    rotary = body.rotary_emb
    ends: dict[str, Any] = {"embedding": as_matrix("embed_tokens.weight", body.embed_tokens.weight)}
    head = model.lm_head.weight
    tied = head.data_ptr() == body.embed_tokens.weight.data_ptr()
    ends["head"] = ends["embedding"] if tied else as_matrix("lm_head.weight", head)
    norm(ends, "norm", "norm", body.norm)
    inv_freq = rotary.inv_freq.to(torch.float32).tolist()
    stack = AttentionStack(ends, inv_freq, float(rotary.attention_scaling), _rope_form(config), kernels)
    for number, layer in enumerate(body.layers):
        try:
            _add_layer(stack, layer)
        except ConfigError as error:
            raise ConfigError(f"layer {number}: {error}", setting=error.setting, value=error.value) from error
    return stack


def _add_layer(stack: AttentionStack, layer: Any) -> None:
    weights: dict[str, Any] = {}
    norm(weights, "input_norm", "input_layernorm", layer.input_layernorm)
    norm(weights, "post_norm", "post_attention_layernorm", layer.post_attention_layernorm)
    attention = layer.self_attn
    linear(weights, "o", "o_proj", attention.o_proj)
    if hasattr(attention, "kv_lora_rank"):
        stack.add_latent(weights, _latent(weights, attention))
    else:
        stack.add_grouped(weights, _grouped(weights, attention))


def _grouped(weights: dict[str, Any], attention: Any) -> dict[str, Any]:
    for key in ("q", "k", "v"):
        linear(weights, key, f"{key}_proj", getattr(attention, f"{key}_proj"))
    for key in ("q_norm", "k_norm"):
        if hasattr(attention, key):
            norm(weights, key, key, getattr(attention, key))
    dim = attention.head_dim
    return {
        "heads": attention.config.num_attention_heads, "kv_heads": attention.config.num_key_value_heads,
        "head_dim": dim, "scale": float(attention.scaling),
    }  # fmt: skip


def _latent(weights: dict[str, Any], attention: Any) -> dict[str, Any]:
    if attention.q_lora_rank is None:
        linear(weights, "q_b", "q_proj", attention.q_proj)
    else:
        linear(weights, "q_a", "q_a_proj", attention.q_a_proj)
        norm(weights, "q_a_norm", "q_a_layernorm", attention.q_a_layernorm)
        linear(weights, "q_b", "q_b_proj", attention.q_b_proj)
    linear(weights, "kv_a", "kv_a_proj_with_mqa", attention.kv_a_proj_with_mqa)
    norm(weights, "kv_a_norm", "kv_a_layernorm", attention.kv_a_layernorm)
    linear(weights, "expand", "kv_b_proj", attention.kv_b_proj)
    return {
        "heads": attention.num_heads, "rank": attention.kv_lora_rank, "nope": attention.qk_nope_head_dim,
        "rope": attention.qk_rope_head_dim, "v_dim": attention.v_head_dim, "scale": float(attention.scaling),
    }  # fmt: skip


def _rope_form(config: Any) -> int:
    if config.model_type == "deepseek_v2":
        return _INTERLEAVED
    if config.model_type == "glm4_moe_lite" and config.rope_interleave:
        return _INTERLEAVED_TO_HALVES
    return _HALVES


def _check_features(config: Any) -> None:
    window = getattr(config, "sliding_window", None)
    if window is not None:
        raise ConfigError(f"sliding_window {window} is not decoded here", setting="sliding_window", value=window)
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in _ROPES:
        raise ConfigError(f"rope_type {rope!r} is none of {_ROPES}", setting="rope_type", value=rope)
