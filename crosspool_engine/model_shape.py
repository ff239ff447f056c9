"""What a model's configuration says about its sizes: KV bytes a token, FFN against attention weights.

Reads the plain `config.json` of a Hugging Face directory; needs neither torch nor transformers, so that a plan can
be made on any machine. Knows no weights and no devices. Source: CrossPool Table 1 (facts of the model configurations).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poolweave.crosspool_engine.attention_shape import Attention, GroupedAttention, LatentAttention
from poolweave.errors import ConfigError, ModelNotFound


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of one MoE layer. `shared_intermediate` is the width of all its shared experts together."""

    num: int
    top_k: int
    intermediate: int
    shared_intermediate: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder model. `dense_layers` lists the layers whose FFN is no mixture.

    *FFN* is what the weights pool holds: routers, experts, shared experts and dense FFNs; everything else (attention,
    norms, embedding, head) stays beside the KV.
    """

    architecture: str
    hidden: int
    num_layers: int
    attention: Attention
    vocab: int
    max_positions: int
    tied: bool = False
    experts: Experts | None = None
    dense_intermediate: int = 0
    dense_layers: tuple[int, ...] = ()
    dense_bias: bool = False

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """KV bytes of one token over all layers: the planner's kappa."""
        return self.num_layers * self.attention.kv_numbers * dtype_bytes

    def is_dense(self, layer: int) -> bool:
        return self.experts is None or layer in self.dense_layers

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert of one layer; 0 for a dense model."""
        return 3 * self.hidden * self.experts.intermediate if self.experts else 0

    def layer_ffn_params(self, layer: int) -> int:
        """FFN weights of one layer."""
        if self.is_dense(layer):
            return self._dense_params
        assert self.experts is not None
        return self.experts.num * self.expert_params + self._unrouted_params

    def active_ffn_params(self, layer: int) -> int:
        """FFN weights that one token reads in one layer: what its time at batch 1 is made of."""
        if self.is_dense(layer):
            return self._dense_params
        assert self.experts is not None
        return self.experts.top_k * self.expert_params + self._unrouted_params

    @property
    def ffn_params(self) -> int:
        return sum(self.layer_ffn_params(layer) for layer in range(self.num_layers))

    @property
    def attention_params(self) -> int:
        return self.num_layers * self.attention.num_params(self.hidden)

    @property
    def embedding_params(self) -> int:
        """Embedding and head; counted once when they are tied."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def norm_params(self) -> int:
        return (2 * self.num_layers + 1) * self.hidden

    @property
    def resident_params(self) -> int:
        """All that stays on the KV side."""
        return self.attention_params + self.embedding_params + self.norm_params

    @property
    def num_params(self) -> int:
        return self.ffn_params + self.resident_params

    @property
    def ffn_share(self) -> float:
        """FFN over FFN + attention + embedding + head."""
        return self.ffn_params / (self.ffn_params + self.attention_params + self.embedding_params)

    @property
    def _dense_params(self) -> int:
        biases = 2 * self.dense_intermediate + self.hidden if self.dense_bias else 0
        return 3 * self.hidden * self.dense_intermediate + biases

    @property
    def _unrouted_params(self) -> int:
        assert self.experts is not None
        return self.hidden * (self.experts.num + 3 * self.experts.shared_intermediate)

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelShape:
        """The shape of the model in a Hugging Face directory. Raises ModelNotFound without a readable config.json."""
        file = Path(path) / "config.json"
        try:
            config = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ModelNotFound(f"no readable config.json in {path}: {error}", path=str(path)) from error
        return cls.from_config(config)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """The shape that a config.json describes.

        Raises ConfigError for an architecture that CrossPool does not decode, naming those it does, and for a
        missing entry, naming it.
        """
        architecture = config.get("model_type")
        read = _READERS.get(str(architecture))
        if read is None:
            raise ConfigError(
                f"model_type {architecture!r} is none of {sorted(_READERS)}", setting="model_type", value=architecture
            )
        try:
            return read(config)
        except KeyError as error:
            raise ConfigError(f"config.json of a {architecture} has no {error}", setting=str(error.args[0])) from error


def _common(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architecture": config["model_type"],
        "hidden": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "vocab": config["vocab_size"],
        "max_positions": config["max_position_embeddings"],
        "tied": bool(config.get("tie_word_embeddings", False)),
        "dense_bias": bool(config.get("mlp_bias", False)),
    }


def _grouped(config: Mapping[str, Any], *, head_norms: bool) -> GroupedAttention:
    heads = config["num_attention_heads"]
    return GroupedAttention(
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        head_norms=head_norms,
        bias=bool(config.get("attention_bias", False)),
    )


def _latent(config: Mapping[str, Any]) -> LatentAttention:
    return LatentAttention(
        heads=config["num_attention_heads"],
        q_rank=config.get("q_lora_rank"),
        kv_rank=config["kv_lora_rank"],
        nope=config["qk_nope_head_dim"],
        rope=config["qk_rope_head_dim"],
        v_dim=config["v_head_dim"],
        bias=bool(config.get("attention_bias", False)),
    )


def _num_experts(config: Mapping[str, Any]) -> int:
    """The checkpoint's name for it changed over the years; all are read."""
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if config.get(key) is not None:
            return int(config[key])
    raise KeyError("num_experts")


def _llama(config: Mapping[str, Any]) -> ModelShape:
    return ModelShape(
        **_common(config),
        attention=_grouped(config, head_norms=config["model_type"] == "qwen3"),
        dense_intermediate=config["intermediate_size"],
    )


def _mixtral(config: Mapping[str, Any]) -> ModelShape:
    experts = Experts(
        num=_num_experts(config), top_k=config["num_experts_per_tok"], intermediate=config["intermediate_size"]
    )
    return ModelShape(**_common(config), attention=_grouped(config, head_norms=False), experts=experts)


def _qwen3_moe(config: Mapping[str, Any]) -> ModelShape:
    only, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    dense = tuple(n for n in range(config["num_hidden_layers"]) if n in only or (n + 1) % step)
    experts = Experts(
        num=_num_experts(config), top_k=config["num_experts_per_tok"], intermediate=config["moe_intermediate_size"]
    )
    return ModelShape(
        **_common(config), attention=_grouped(config, head_norms=True), experts=experts,
        dense_intermediate=config["intermediate_size"], dense_layers=dense,
    )  # fmt: skip


def _latent_moe(config: Mapping[str, Any]) -> ModelShape:
    """DeepSeek-V2 and GLM-4.7-Flash: the first layers are dense, by count or by an explicit list."""
    kinds = config.get("mlp_layer_types")
    first = config.get("first_k_dense_replace", 1 if config["model_type"] == "glm4_moe_lite" else 0)
    dense = [n for n, kind in enumerate(kinds) if kind == "dense"] if kinds else range(first)
    width = config["moe_intermediate_size"]
    experts = Experts(
        num=_num_experts(config), top_k=config["num_experts_per_tok"], intermediate=width,
        shared_intermediate=width * (config.get("n_shared_experts") or 0),
    )  # fmt: skip
    return ModelShape(
        **_common(config), attention=_latent(config), experts=experts,
        dense_intermediate=config["intermediate_size"], dense_layers=tuple(dense),
    )  # fmt: skip


_READERS = {
    "llama": _llama,
    "qwen3": _llama,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _latent_moe,
    "glm4_moe_lite": _latent_moe,
}
