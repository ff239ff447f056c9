"""Engines that several tests share: a start costs half a minute."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import EngineProcess, vllm_python


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama, float32; no tokenizer is needed for token ids."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def adapters(tiny: Path) -> dict[str, str]:
    """Two LoRA adapters of `tiny`, large enough to change its answers."""
    import torch
    from safetensors.torch import save_file

    made = {}
    for seed, name in enumerate(("first", "second")):
        path = tiny.parent / name
        path.mkdir()
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"], "bias": "none",
                  "base_model_name_or_path": str(tiny), "task_type": "CAUSAL_LM"}  # fmt: skip
        (path / "adapter_config.json").write_text(json.dumps(config))
        rng = torch.Generator().manual_seed(seed)
        weights = {}
        for layer in range(2):
            for module, out in (("q_proj", 128), ("v_proj", 64)):
                stem = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                weights[f"{stem}.lora_A.weight"] = torch.randn(8, 128, generator=rng)
                weights[f"{stem}.lora_B.weight"] = torch.randn(out, 8, generator=rng)
        save_file(weights, path / "adapter_model.safetensors")
        made[name] = str(path)
    return made


@pytest.fixture(scope="session")
def plain(tiny: Path, adapters: dict[str, str]) -> Iterator[EngineProcess]:
    """vLLM alone, without a cache of prefixes: what every other engine must answer."""
    engine = EngineProcess(
        tiny, enable_prefix_caching=False, enable_lora=True, max_loras=2, max_lora_rank=8, adapters=adapters,
        skip_tokenizer_init=True,
    )  # fmt: skip
    yield engine
    engine.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(900))
            if vllm_python() is None:
                item.add_marker(pytest.mark.skip(reason="run by `make test-vllm`"))
