"""Shared by this room's tests: the models' configurations as their config.json states them, and the real traces."""

from __future__ import annotations

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
