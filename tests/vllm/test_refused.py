"""What the connector cannot keep, the real engine refuses at its start, by name."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from engines import START_S, engine_arguments, engine_environment, vllm_python

SMALL: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
}  # fmt: skip
MAMBA = {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
LATENT = {"kv_lora_rank": 64, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
          "moe_intermediate_size": 64, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
          "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "window": ("mistral", {}, "KV of kind SlidingWindowSpec is not supported"),
    "windows-between": ("gemma3", {}, r"hybrid KV cache groups \(.*SlidingWindowSpec.*\) are not supported"),
    "mamba": ("falcon_h1", {}, r"hybrid KV cache groups \(.*MambaSpec.*\) are not supported"),
    "latent": ("deepseek_v2", {}, "KV of kind MLAAttentionSpec is not supported"),
    "fp8": ("llama", {"kv_cache_dtype": "fp8"}, "KV of type uint8 is not supported"),
    "speculative": (
        "llama",
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        "speculative decoding is not supported",
    ),
    "ranks": ("llama", {"pipeline_parallel_size": 2}, "an engine cut over 2 ranks is not supported"),
    "tensor-parallel": (
        "llama",
        {"tensor_parallel_size": 2, "config_only": True},
        "an engine cut over 2 ranks is not supported; run this engine without PoolConnector",
    ),
    "tensor-and-pipeline-parallel": (
        "llama",
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "config_only": True},
        "an engine cut over 4 ranks is not supported",
    ),
    "whole": ("llama", {"config_only": True}, "^$"),  # what is built like the two before, on one rank, is taken
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each engine says, by case."""
    path = tmp_path_factory.mktemp("refused")
    _save_models(path)
    arguments = {
        case: engine_arguments(path / model, pool={"size": "64MiB"}, skip_tokenizer_init=True, **more)
        for case, (model, more, _) in CASES.items()
    }
    command = [vllm_python() or "", str(Path(__file__).with_name("refusal_process.py")), json.dumps(arguments)]
    done = subprocess.run(
        command, env=engine_environment(path), cwd=path, capture_output=True, text=True, timeout=START_S
    )
    told: dict[str, str] = {}
    for line in done.stdout.splitlines():
        told.update(json.loads(line))
    assert told.keys() == CASES.keys(), done.stderr[-4000:]
    return told


def _save_models(path: Path) -> None:
    """Random ones."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        DeepseekV2Config,
        FalconH1Config,
        Gemma3TextConfig,
        LlamaConfig,
        MistralConfig,
        PretrainedConfig,
    )

    kinds = ["sliding_attention", "full_attention"]
    configs: dict[str, PretrainedConfig] = {
        "llama": LlamaConfig(**SMALL),
        "mistral": MistralConfig(**SMALL, sliding_window=64),
        "gemma3": Gemma3TextConfig(**SMALL, sliding_window=64, layer_types=kinds),
        "falcon_h1": FalconH1Config(**SMALL, **MAMBA),
        "deepseek_v2": DeepseekV2Config(**{**SMALL, "num_key_value_heads": 4}, **LATENT),
    }
    for name, config in configs.items():
        AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(path / name)


@pytest.mark.parametrize("case", CASES)
def test_what_a_pool_cannot_keep_is_refused_by_name(refusals: dict[str, str], case: str) -> None:
    if case == "fp8" and "requires x86 with AVX-512 or AMX" in refusals[case]:
        pytest.skip("vLLM itself keeps no FP8 KV on this processor")
    assert re.search(CASES[case][2], refusals[case]), refusals[case]
