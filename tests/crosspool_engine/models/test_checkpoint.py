"""Directories read without torch: transformers' values, each half its own, bad ones refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the engine extra")

import torch

from poolweave.crosspool_engine.models import Checkpoint, build_attention_stack, build_ffn_stack
from poolweave.errors import ConfigError, ModelNotFound

pytestmark = pytest.mark.engine
VARIANTS = ["llama", "llama-mha-bias", "llama-mqa-tied", "qwen3", "mixtral", "qwen3-moe", "deepseek-v2-groups", "glm"]
Save = Callable[..., tuple[Any, Path]]


@pytest.fixture
def saved(tiny: Callable[..., Any], tmp_path: Path) -> Save:
    def save(variant: str, **overrides: Any) -> tuple[Any, Path]:
        model = tiny(variant, **overrides)
        model.save_pretrained(tmp_path / variant)
        return model, tmp_path / variant

    return save


def numbers(module: Any) -> int:
    return sum(weight.numel() for name, weight in module.state_dict().items() if "inv_freq" not in name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_kv_side_reads_no_ffn_byte_and_the_other_nothing_else(saved: Save, variant: str) -> None:
    """Together they read each weight just once."""
    model, path = saved(variant)
    attention, ffn = Checkpoint(path), Checkpoint(path)
    build_attention_stack(attention)
    build_ffn_stack(ffn)
    assert ffn.read_numbers == sum(numbers(layer.mlp) for layer in model.model.layers)
    tied = numbers(model.lm_head) if model.config.tie_word_embeddings else 0
    assert attention.read_numbers + ffn.read_numbers == numbers(model) - tied


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_those_that_transformers_loads(saved: Save, stored: str, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    model, path = saved("glm")
    model.to(getattr(torch, stored)).save_pretrained(path)
    want = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).model.layers[2]
    checkpoint = Checkpoint(path, dtype)
    got = checkpoint.matrix("model.layers.2.self_attn.o_proj.weight", (72, 168))
    exact = want.self_attn.o_proj.weight.detach()
    bits = exact.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else exact.numpy()
    assert got.tobytes() == bits.tobytes()
    norm = checkpoint.vector("model.layers.2.input_layernorm.weight", 72)
    assert norm.tobytes() == want.input_layernorm.weight.detach().float().numpy().tobytes()
    router = checkpoint.matrix("model.layers.2.mlp.gate.weight", (8, 72), wide=True)
    assert router.tobytes() == want.mlp.gate.weight.detach().float().numpy().tobytes()


@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe", "glm"])
def test_several_files_and_experts_in_one_tensor_are_the_same_model(saved: Save, variant: str, tmp_path: Path) -> None:
    model, path = saved(variant)
    x, got = np.random.default_rng(0).standard_normal((3, 72)).astype(np.float32), []
    model.save_pretrained(tmp_path / "parts", max_shard_size="40KB")
    assert (tmp_path / "parts/model.safetensors.index.json").is_file()
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    for folder in (path, tmp_path / "parts", tmp_path / "fused"):
        stack, out = build_ffn_stack(Checkpoint(folder)), np.empty((3, 72), np.float32)
        stack.forward(2, x, out)
        got.append(out.tobytes())
    assert got[0] == got[1] == got[2]


def spoil(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


K, UP = "model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.experts.6.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(K), r"layers\.1\.self_attn\.k_proj\.weight is missing from"),
        (lambda w: w.update({K: torch.zeros(7, 72)}), r"k_proj\.weight must be 40 x 72, is 7 x 72"),
        (lambda w: w[K].view(-1)[5].fill_(torch.nan), r"layers\.1\.self_attn\.k_proj\.weight holds NaN or infinity"),
        (lambda w: w.update({K: torch.zeros(40, 72, dtype=torch.int8)}), r"k_proj\.weight is I8; weights are read"),
        (lambda w: w.pop(UP), r"layers\.1\.mlp\.experts\.6\.up_proj\.weight is missing from"),
        (lambda w: w.update({UP: torch.zeros(44, 71)}), r"experts\.6\.up_proj\.weight must be 44 x 72, is 44 x 71"),
        (lambda w: w[UP].view(-1)[5].fill_(torch.inf), r"experts\.6\.up_proj\.weight holds NaN or infinity"),
    ],
)
def test_spoilt_weights_are_refused_by_name_by_the_half_that_needs_them(
    saved: Save, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    _, path = saved("qwen3-moe", mlp_only_layers=[])
    spoil(path, change)
    needs, other = build_attention_stack, build_ffn_stack
    if "experts" in message:
        needs, other = other, needs
    with pytest.raises(ConfigError, match=message):
        needs(Checkpoint(path))
    other(Checkpoint(path))


def test_a_missing_bias_is_refused(saved: Save) -> None:
    _, path = saved("llama-mha-bias")
    spoil(path, lambda weights: weights.pop("model.layers.0.self_attn.o_proj.bias"))
    with pytest.raises(ConfigError, match=r"o_proj\.bias is missing"):
        build_attention_stack(Checkpoint(path))


def test_no_model_there(saved: Save, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nothing"):
        Checkpoint(tmp_path / "nothing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip_text_model"}))
    with pytest.raises(ConfigError, match="model_type 'clip_text_model' is none of"):
        Checkpoint(tmp_path)
    _, path = saved("llama")
    with pytest.raises(ConfigError, match="'int8' is none of"):
        Checkpoint(path, "int8")
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ConfigError, match=r"model\.norm\.weight ends after \d+ of 72 numbers"):
        build_attention_stack(Checkpoint(path))
    (path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="is no safetensors file"):
        Checkpoint(path)
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"no model\.safetensors"):
        Checkpoint(path)


def test_reading_a_model_loads_neither_torch_nor_transformers(saved: Save) -> None:
    _, path = saved("glm")
    code = (
        "import sys; from poolweave.crosspool_engine.models import Checkpoint, build_attention_stack, build_ffn_stack;"
        f"c = Checkpoint({str(path)!r}); build_attention_stack(c); build_ffn_stack(c);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'safetensors')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
