"""Who loads which layers, by default and as a plan says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from poolweave.crosspool_engine import EngineConfig, FfnPlacement, Serving
from poolweave.crosspool_engine.served_model import ServedModel
from poolweave.errors import ConfigError


def served(configs: dict[str, Any], tmp_path: Path, **options: Any) -> ServedModel:
    (tmp_path / "config.json").write_text(json.dumps(configs["glm"]))
    config = EngineConfig(kv_budget="1GiB", ffn_ranks=3, **options)
    return ServedModel.of("glm", Serving(path=str(tmp_path), dtype="bfloat16"), index=2, config=config)


def test_orders_name_each_layer_once(configs: dict[str, Any], tmp_path: Path) -> None:
    model = served(configs, tmp_path)
    orders = model.orders()
    assert set(orders) == {0, 1, 2, 3}
    assert orders[0].max_blocks == model.max_blocks[0] == 2**30 // (54_144 * 16)
    layers = [layer for place in (1, 2, 3) for layer in orders[place].layers]
    assert layers == list(range(47))
    assert model.row_shape == (47, 1, 16, 1, 576)
    assert model.layer_cost == pytest.approx(
        (model.shape.attention_params + sum(model.shape.active_ffn_params(n) for n in range(47))) / 47
    )


def test_what_does_not_fit_is_refused(configs: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2048 wide, max_hidden 1024"):
        served(configs, tmp_path, max_hidden=1024)
    config = EngineConfig(kv_budget="2MiB", block_tokens=64)
    with pytest.raises(ConfigError, match="holds no block of glm"):
        ServedModel.of("glm", Serving(path=str(tmp_path)), index=0, config=config)
    for serving, message in (
        (Serving(path=str(tmp_path), placement=FfnPlacement.by_layer([1] * 47)), "FFN ranks .1. of 1 do not hold"),
        (Serving(path=str(tmp_path), replicas=((1,),)), "attention ranks .*1.*, each once, of 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            ServedModel.of("glm", serving, index=0, config=EngineConfig(kv_budget="1GiB"))


def test_config_is_checked() -> None:
    for options, message in (
        ({"max_batch": 17}, "max_batch must be at least 1 and at most 16"),
        ({"ffn_ranks": 9}, "ffn_ranks"),
        ({"in_flight": 0}, "in_flight"),
        ({"cores": (0,)}, "cores names 1 CPUs, there are 2 workers"),
        ({"kv_budget": 100}, "holds no page"),
        ({"kv_budget": ("1GiB", "1GiB")}, "names 2 ranks, there are 1"),
        ({"deadline_s": 0.0}, "deadline_s"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig(**{"kv_budget": "1GiB", **options})  # type: ignore[arg-type]
