"""Sizes from configurations, against the papers' table and against transformers' own modules at full size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from poolweave.crosspool_engine.model_shape import ModelShape
from poolweave.errors import ConfigError, ModelNotFound

# Per model: layers, FFN and attention parameters in billions, FFN share in percent, KV bytes a token in bf16.
TABLE = {
    "qwen3": (48, 29.0, 0.9, 95.0, 98_304),
    "glm": (47, 28.3, 1.0, 94.5, 54_144),
    "deepseek": (27, 14.9, 0.4, 95.0, 31_104),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_papers_fifteen_values(configs: dict[str, Any], name: str) -> None:
    shape = ModelShape.from_config(configs[name])
    got = (
        shape.num_layers,
        round(shape.ffn_params / 1e9, 1),
        round(shape.attention_params / 1e9, 1),
        round(100 * shape.ffn_share, 1),
        shape.kv_bytes_per_token(),
    )
    assert got == TABLE[name]


def test_llama_13b_keeps_800_kib_a_token(configs: dict[str, Any]) -> None:
    assert ModelShape.from_config(configs["llama"]).kv_bytes_per_token() == 819_200


def test_the_three_models_together_in_bf16(configs: dict[str, Any]) -> None:
    shapes = [ModelShape.from_config(configs[name]) for name in TABLE]
    assert round(2 * sum(s.num_params for s in shapes) / 1e9, 1) == 152.4
    assert round(2 * sum(s.ffn_params for s in shapes) / 1e9, 1) == 144.4
    assert round(2 * sum(s.resident_params for s in shapes) / 1e9, 2) == 7.95


@pytest.mark.parametrize(("name", "products"), [("qwen3", 2 * 32 * 128), ("deepseek", 16 * (2 * 512 + 64))])
def test_products_over_a_cached_token(configs: dict[str, Any], name: str, products: int) -> None:
    assert ModelShape.from_config(configs[name]).attention.kv_products == products


@pytest.mark.engine
@pytest.mark.parametrize("name", ["qwen3", "glm", "deepseek", "llama", "mixtral", "qwen3-dense"])
def test_parameters_equal_transformers_modules(configs: dict[str, Any], name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape = ModelShape.from_config(configs[name])
    config = transformers.AutoConfig.for_model(**configs[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    if shape.tied:
        model.tie_weights()
    sizes = {key: value.numel() for key, value in model.named_parameters()}
    assert shape.num_params == sum(sizes.values())
    assert shape.ffn_params == sum(n for key, n in sizes.items() if ".mlp." in key)
    assert shape.attention_params == sum(n for key, n in sizes.items() if ".self_attn." in key)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["glm", "deepseek", "llama", "qwen3"])
def test_biases_are_counted(configs: dict[str, Any], name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = {**configs[name], "attention_bias": True, "num_hidden_layers": 2}
    if name == "llama":
        config["mlp_bias"] = True
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert ModelShape.from_config(config).num_params == sum(p.numel() for p in model.parameters())


def test_active_weights_are_those_of_the_chosen_experts(configs: dict[str, Any]) -> None:
    shape = ModelShape.from_config(configs["deepseek"])
    assert shape.is_dense(0)
    assert not shape.is_dense(1)
    assert shape.active_ffn_params(0) == shape.layer_ffn_params(0) == 3 * 2048 * 10944
    assert shape.active_ffn_params(1) == 2048 * (64 + 3 * 1408 * (6 + 2))
    assert shape.layer_ffn_params(1) == 2048 * (64 + 3 * 1408 * (64 + 2))


def test_dense_layers_by_list_by_step_and_by_type(configs: dict[str, Any]) -> None:
    qwen = {**configs["qwen3"], "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    assert ModelShape.from_config(qwen).dense_layers == (0, 1, 2, 4)
    glm = {**configs["glm"], "num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]}
    assert ModelShape.from_config(glm).dense_layers == (1,)


def test_names_of_the_expert_count_over_the_years(configs: dict[str, Any]) -> None:
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        config = {k: v for k, v in configs["qwen3"].items() if k != "num_experts"}
        experts = ModelShape.from_config({**config, key: 128}).experts
        assert experts is not None
        assert experts.num == 128
    with pytest.raises(ConfigError, match="num_experts"):
        ModelShape.from_config(config)


def test_unknown_architecture_and_missing_entry_are_named(configs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'gpt2' is none of"):
        ModelShape.from_config({"model_type": "gpt2"})
    with pytest.raises(ConfigError, match="kv_lora_rank"):
        ModelShape.from_config({k: v for k, v in configs["glm"].items() if k != "kv_lora_rank"})


def test_from_directory(configs: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=str(tmp_path)):
        ModelShape.from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(configs["glm"]))
    assert ModelShape.from_directory(tmp_path) == ModelShape.from_config(configs["glm"])
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        ModelShape.from_directory(tmp_path)
