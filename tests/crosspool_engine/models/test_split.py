"""Both halves of ordinary checkpoints: together the model, apart neither holds the other's weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the engine extra")

import torch

from poolweave.crosspool_engine.models import build_attention_stack, build_ffn_stack, load_attention, load_ffn
from poolweave.errors import ConfigError, ModelNotFound

pytestmark = pytest.mark.engine
VARIANTS = ["llama", "llama-mqa-tied", "qwen3", "mixtral", "qwen3-moe", "deepseek-v2", "glm"]


@pytest.fixture
def saved(tiny: Callable[..., Any], tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    def save(variant: str, **overrides: Any) -> tuple[Any, Path]:
        model = tiny(variant, **overrides)
        model.save_pretrained(tmp_path / variant)
        return model, tmp_path / variant

    return save


def nbytes(module: Any) -> int:
    return sum(t.numel() * t.element_size() for t in [*module.parameters(), *module.buffers()])


@pytest.mark.parametrize("variant", VARIANTS)
def test_halves_make_the_whole(saved: Callable[..., tuple[Any, Path]], variant: str) -> None:
    model, path = saved(variant)
    mlps = load_ffn(path)
    half = load_attention(path, call=lambda layer, x: mlps[layer](x), attn_implementation="eager")
    tokens = torch.arange(17)[None]
    with torch.inference_mode():
        torch.testing.assert_close(half(tokens).logits, model(tokens).logits, rtol=0, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_kv_side_holds_no_ffn_byte_and_the_other_nothing_else(
    saved: Callable[..., tuple[Any, Path]], variant: str
) -> None:
    model, path = saved(variant)
    half, mlps = load_attention(path), load_ffn(path)
    assert sum(nbytes(layer.mlp) for layer in half.model.layers) == 0
    ffn = sum(nbytes(layer.mlp) for layer in model.model.layers)
    assert sum(map(nbytes, mlps)) == ffn
    assert nbytes(half) + ffn == nbytes(model)
    with pytest.raises(ConfigError, match="layer 0 has no FFN on this side"):
        half(torch.arange(3)[None])


def test_some_layers_only(saved: Callable[..., tuple[Any, Path]]) -> None:
    model, path = saved("deepseek-v2")
    (mlp,) = load_ffn(path, layers=[1])
    torch.testing.assert_close(mlp.gate.weight, model.model.layers[1].mlp.gate.weight)


def test_bf16_halves(saved: Callable[..., tuple[Any, Path]]) -> None:
    _, path = saved("glm")
    half, mlps = load_attention(path, dtype="bfloat16"), load_ffn(path, dtype="bfloat16")
    assert half.model.layers[0].self_attn.kv_b_proj.weight.dtype == torch.bfloat16
    assert mlps[1].experts.down_proj.dtype == torch.bfloat16
    build_attention_stack(half)
    build_ffn_stack(mlps, half.config)
    with pytest.raises(ConfigError, match="'int8' is none of"):
        load_ffn(path, dtype="int8")


def spoil(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def test_a_directory_with_missing_weights_is_refused_by_name(saved: Callable[..., tuple[Any, Path]]) -> None:
    _, path = saved("qwen3-moe")
    spoil(path, lambda weights: weights.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(ConfigError, match=r"lacks 1 weights.*layers\.1\.self_attn\.k_proj"):
        load_attention(path)
    load_ffn(path)  # what is missing belongs to the other half
    spoil(path, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj"):
        load_ffn(path)


def test_a_directory_with_misshapen_weights_is_refused_by_name(saved: Callable[..., tuple[Any, Path]]) -> None:
    _, path = saved("llama")
    key = "model.layers.2.self_attn.v_proj.weight"
    spoil(path, lambda weights: weights.update({key: torch.zeros(7, 72)}))
    with pytest.raises(ConfigError, match=r"1 of another shape, first model\.layers\.2\.self_attn\.v_proj"):
        load_attention(path)


def test_a_directory_with_nan_weights_is_refused_by_name(saved: Callable[..., tuple[Any, Path]]) -> None:
    _, path = saved("llama")
    spoil(path, lambda weights: weights["model.layers.2.mlp.down_proj.weight"].fill_(float("nan")))
    with pytest.raises(ConfigError, match=r"FFN 2: down_proj\.weight holds NaN"):
        build_ffn_stack(load_ffn(path), load_attention(path).config)


def test_no_model_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nothing"):
        load_attention(tmp_path / "nothing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip_text_model"}))
    with pytest.raises(ModelNotFound, match="no causal language model"):
        load_ffn(tmp_path)
