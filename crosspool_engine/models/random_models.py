"""Small models of the paper's three architectures with random weights, for benchmarks and demos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 2048

NAMES = ("qwen3", "deepseek", "glm")


def save_random_models(
    folder: Path, *, hidden: int, layers: int, dtype: str = "float32", only: tuple[str, ...] = NAMES
) -> dict[str, str]:
    """Directories by name: a Qwen3-MoE, a DeepSeek-V2 and a GLM-4.7-Flash, `hidden` wide. The same ones each time."""
    import transformers

    paths = {}
    for seed, (name, config) in enumerate(_configs(hidden, layers).items()):
        if name not in only:
            continue
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.normal_(0, weight.shape[-1] ** -0.5)
        model.to(getattr(torch, dtype)).save_pretrained(folder / name)
        paths[name] = str(folder / name)
    return paths


def _configs(hidden: int, layers: int) -> dict[str, dict[str, Any]]:
    heads = hidden // 64
    base = {
        "vocab_size": VOCAB, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_experts_per_tok": 2, "max_position_embeddings": 1024, "intermediate_size": 2 * hidden,
        "moe_intermediate_size": hidden // 2,
    }  # fmt: skip
    latent = {
        "num_key_value_heads": heads, "n_routed_experts": 16, "n_shared_experts": 1, "kv_lora_rank": hidden // 4,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_group": 1, "topk_group": 1,
        "q_lora_rank": None,
    }  # fmt: skip
    grouped = {"num_key_value_heads": max(1, hidden // 256), "head_dim": 64, "num_experts": 16, "norm_topk_prob": True}
    return {
        "qwen3": {"model_type": "qwen3_moe", **base, **grouped},
        "deepseek": {
            "model_type": "deepseek_v2", "first_k_dense_replace": 1, "topk_method": "greedy", **base, **latent,
        },
        "glm": {"model_type": "glm4_moe_lite", **base, **latent},
    }  # fmt: skip
