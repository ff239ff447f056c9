"""Rotary frequencies read from a config.json against those that transformers computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the engine extra")

from poolweave.crosspool_engine.models.rope import read_rope
from poolweave.errors import ConfigError

pytestmark = pytest.mark.engine
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 500000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_type": "default", "rope_theta": 10000.0}),
    ("llama", {"rope_type": "linear", "factor": 3.0, "rope_theta": 20000.0}),
    ("llama", LLAMA3),
    ("llama", YARN),
    ("llama", {**YARN, "truncate": False, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.3}),
    ("mixtral", {}),
    ("deepseek-v2", {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}),
    ("glm", {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
]


@pytest.mark.parametrize(("variant", "rope"), CASES)
def test_frequencies_and_scales_are_those_of_transformers(
    tiny: Callable[..., Any], tmp_path: Path, variant: str, rope: dict[str, Any]
) -> None:
    model = tiny(variant, **({"rope_parameters": rope} if rope else {}))
    model.config.save_pretrained(tmp_path)
    rotary, attention = model.model.rotary_emb, model.model.layers[0].self_attn
    got = read_rope(json.loads((tmp_path / "config.json").read_text()), 2 * len(rotary.inv_freq))
    np.testing.assert_allclose(got.inv_freq, rotary.inv_freq.numpy(), rtol=2e-6)  # theirs are powers in float32
    assert got.scale == pytest.approx(rotary.attention_scaling, rel=1e-12)
    if variant in ("deepseek-v2", "glm"):
        assert 32**-0.5 * got.latent_scale == pytest.approx(attention.scaling, rel=1e-12)


def test_settings_of_older_checkpoints_are_read() -> None:
    new = {"model_type": "llama", "max_position_embeddings": 512, "rope_parameters": LLAMA3}
    scaling = {"type" if key == "rope_type" else key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    old = {"model_type": "llama", "max_position_embeddings": 512, "rope_theta": 500000.0, "rope_scaling": scaling}
    assert read_rope(old, 20) == read_rope(new, 20)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="rope_type 'dynamic' is none of"):
        read_rope({"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 8)
    with pytest.raises(ConfigError, match="rope_type 'linear' needs 'factor'"):
        read_rope({"model_type": "llama", "rope_parameters": {"rope_type": "linear"}}, 8)
