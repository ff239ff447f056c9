"""Models come and go whole: a failure leaves everything as it was, a second activation is the first one's twin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from ref_decode import decode, drive, mixed, tokens_of

from poolweave.crosspool_engine import DecodeEngine, DecodeRequest, FfnPlacement, Serving
from poolweave.errors import ConfigError, ModelNotFound

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(600)]
UP = "model.layers.2.mlp.shared_experts.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


def test_deactivating_gives_everything_back_and_a_second_activation_is_bit_identical(
    engine: DecodeEngine, saved: dict[str, tuple[Any, str]]
) -> None:
    request = DecodeRequest(
        request_id="a", model="glm", tokens=[3, 1, 4], max_new_tokens=30, temperature=0.7, seed=1, return_kv=True
    )
    first = decode(engine, [request])["a"]
    engine.add(DecodeRequest(request_id="held", model="glm", tokens=[5], max_new_tokens=100))
    with pytest.raises(ConfigError, match="'glm' has 0 requests running, 1 waiting"):
        engine.deactivate("glm")
    engine.cancel("held")
    drive(engine)
    engine.result("held")
    engine.deactivate("glm")
    assert "glm" not in engine.stats().models
    with pytest.raises(ConfigError, match="no model 'glm' is active"):
        engine.add(request)
    engine.activate("glm", Serving(path=saved["glm"][1]))
    second = decode(engine, [request])["a"]
    assert first.tokens.tobytes() == second.tokens.tobytes()
    assert first.kv is not None
    assert second.kv is not None
    assert first.kv.tobytes() == second.kv.tobytes()


def _not_a_number(weights: dict[str, Any]) -> None:
    weights[UP][0] = float("nan")


def _missing(weights: dict[str, Any]) -> None:
    del weights[UP]


def _misshapen(weights: dict[str, Any]) -> None:
    weights[UP] = weights[UP][:, :5].contiguous()


def _no_norm(weights: dict[str, Any]) -> None:
    weights[NORM][3] = float("inf")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_not_a_number, r"shared_experts\.up_proj\.weight holds NaN"),
        (_missing, r"layers\.2\.mlp\.shared_experts\.up_proj\.weight is missing from"),
        (_misshapen, r"shared_experts\.up_proj\.weight must be 88 x 72, is 88 x 5"),
        (_no_norm, r"input_layernorm\.weight holds NaN or infinity"),
    ],
)
def test_a_spoilt_directory_is_refused_by_name_and_leaves_everything_as_it_was(
    engine: DecodeEngine, saved: dict[str, tuple[Any, str]], tmp_path: Path,
    spoil: Callable[[dict[str, Any]], None], message: str,
) -> None:  # fmt: skip
    """The attention half may be loaded when the FFN half fails: both are given back."""
    from safetensors.torch import load_file, save_file

    saved["glm"][0].save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    spoil(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    engine.deactivate("glm")
    before = engine.stats()
    with pytest.raises(ConfigError, match=message):
        engine.activate("spoilt", Serving(path=str(tmp_path)))
    assert engine.stats() == before
    engine.check()
    engine.activate("glm", Serving(path=saved["glm"][1]))  # in the place that the spoilt one was to have


def test_what_cannot_be_activated_is_refused(
    engine: DecodeEngine, saved: dict[str, tuple[Any, str]], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="'more' is active already, or max_models 6 are"):
        engine.activate("more", Serving(path=saved["glm"][1]))
    engine.deactivate("glm")
    with pytest.raises(ModelNotFound):
        engine.activate("nothing", Serving(path=str(tmp_path / "nothing")))
    with pytest.raises(ConfigError, match="do not hold each of 3 layers"):
        engine.activate("glm", Serving(path=saved["glm"][1], placement=FfnPlacement.by_layer([0, 0])))
    engine.activate("glm", Serving(path=saved["glm"][1]))
    assert tokens_of(decode(engine, mixed())) == expected


def test_workers_are_small_and_have_no_torch(engine: DecodeEngine) -> None:
    for pid in engine.worker_pids():
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "_core" in maps
        assert "torch" not in maps
        assert psutil.Process(pid).memory_full_info().uss < 64 << 20  # 26 MiB before a model; 150 with torch
