"""Shared by this room's tests: the papers' model configurations and small random models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "mlp_only_layers": [], "decoder_sparse_step": 1,
    "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False, "norm_topk_prob": True,
}  # fmt: skip
GLM_FLASH: dict[str, Any] = {
    "model_type": "glm4_moe_lite", "hidden_size": 2048, "num_hidden_layers": 47, "num_attention_heads": 20,
    "num_key_value_heads": 20, "head_dim": 64, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64, "num_experts_per_tok": 4,
    "n_shared_experts": 1, "moe_intermediate_size": 1536, "intermediate_size": 10240, "first_k_dense_replace": 1,
    "vocab_size": 154880, "max_position_embeddings": 202752, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "n_shared_experts": 2, "moe_intermediate_size": 1408, "intermediate_size": 10944, "first_k_dense_replace": 1,
    "vocab_size": 102400, "max_position_embeddings": 163840, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA2_13B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
    "num_key_value_heads": 40, "intermediate_size": 13824, "vocab_size": 32000, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336,
    "vocab_size": 32000, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_DENSE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
    "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip
ALL = {
    "qwen3": QWEN3_30B,
    "glm": GLM_FLASH,
    "deepseek": DEEPSEEK_LITE,
    "llama": LLAMA2_13B,
    "mixtral": MIXTRAL,
    "qwen3-dense": QWEN3_DENSE,
}


@pytest.fixture(scope="session")
def configs() -> dict[str, dict[str, Any]]:
    """All six by name; the first three are the paper's cold models."""
    return ALL


# Small random models, with routers and norms drawn wide enough that a wrong one shows.
BASE = {
    "vocab_size": 199, "hidden_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_experts_per_tok": 3, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
GQA = {"num_key_value_heads": 2, "head_dim": 20, "intermediate_size": 100}
MLA = {
    "num_key_value_heads": 6, "intermediate_size": 100, "moe_intermediate_size": 44, "n_routed_experts": 8,
    "n_shared_experts": 2, "kv_lora_rank": 36, "qk_nope_head_dim": 20, "qk_rope_head_dim": 12, "v_head_dim": 28,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0,
    "mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **BASE, **GQA},
    "llama-mha-bias": {
        "model_type": "llama", **BASE, **GQA, "num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_theta": 500000.0,
        },
    },
    "llama-mqa-tied": {"model_type": "llama", **BASE, **GQA, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **BASE, **GQA},
    "mixtral": {"model_type": "mixtral", **BASE, **GQA, "num_local_experts": 5, "intermediate_size": 60},
    "qwen3-moe": {
        "model_type": "qwen3_moe", **BASE, **GQA, "num_experts": 8, "moe_intermediate_size": 44,
        "mlp_only_layers": [1], "norm_topk_prob": True,
    },
    "qwen3-moe-unnormalised": {
        "model_type": "qwen3_moe", **BASE, **GQA, "num_experts": 8, "moe_intermediate_size": 44,
        "norm_topk_prob": False,
    },
    "deepseek-v2": {
        "model_type": "deepseek_v2", **BASE, **MLA, "q_lora_rank": None, "first_k_dense_replace": 1,
        "topk_method": "greedy", "routed_scaling_factor": 1.7,
    },
    "deepseek-v2-groups": {
        "model_type": "deepseek_v2", **BASE, **MLA, "q_lora_rank": 40, "first_k_dense_replace": 0,
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "rope_parameters": YARN,
    },
    "glm": {"model_type": "glm4_moe_lite", **BASE, **MLA, "q_lora_rank": 40, "norm_topk_prob": True},
    "glm-groups": {
        "model_type": "glm4_moe_lite", **BASE, **MLA, "q_lora_rank": None, "n_group": 2, "topk_group": 1,
        "rope_interleave": False, "norm_topk_prob": False, "attention_bias": True,
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def variants() -> dict[str, dict[str, Any]]:
    return VARIANTS


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """`tiny(variant, **overrides)`: a random CausalLM of transformers in float32, the same each time."""
    torch = pytest.importorskip("torch", reason="needs the engine extra")
    transformers = pytest.importorskip("transformers", reason="needs the engine extra")

    def make(variant: str, *, seed: int = 0, **overrides: Any) -> Any:
        config = transformers.AutoConfig.for_model(**{**VARIANTS[variant], **overrides})
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, weight in [*model.named_parameters(), *model.named_buffers()]:
                if "norm" in name:
                    weight.uniform_(0.5, 1.5)
                elif "inv_freq" not in name:
                    weight.normal_(0, 0.5 if "gate.weight" in name or "correction_bias" in name else 0.1)
        return model

    return make
