"""Who loads which layers, by default and as a plan says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poolweave.crosspool_engine import EngineConfig, owners_in_plan
from poolweave.crosspool_engine.model_shape import ModelShape
from poolweave.crosspool_engine.planner import Device, PlanRequest, Trace, Workload, make_plan
from poolweave.crosspool_engine.served_model import ServedModel, spread
from poolweave.errors import ConfigError


def served(configs: dict[str, Any], tmp_path: Path, **options: Any) -> ServedModel:
    (tmp_path / "config.json").write_text(json.dumps(configs["glm"]))
    config = EngineConfig(kv_budget="1GiB", ffn_ranks=3, **options)
    return ServedModel.of("glm", str(tmp_path), index=2, dtype="bfloat16", config=config, owners=None)


def test_spread_is_even_and_in_order() -> None:
    assert spread(7, 3) == (0, 0, 0, 1, 1, 2, 2)
    assert spread(2, 3) == (0, 1)


def test_orders_name_each_layer_once(configs: dict[str, Any], tmp_path: Path) -> None:
    model = served(configs, tmp_path)
    orders = model.orders()
    assert set(orders) == {0, 1, 2, 3}
    assert orders[0].max_blocks == model.max_blocks == 2**30 // (54_144 * 16)
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
        ServedModel.of("glm", str(tmp_path), index=0, dtype="float32", config=config, owners=None)
    with pytest.raises(ConfigError, match="47 layers on 1 FFN ranks"):
        ServedModel.of("glm", str(tmp_path), index=0, dtype="float32", config=config, owners=[1] * 47)


def test_owners_come_from_a_plan(configs: dict[str, Any]) -> None:
    pytest.importorskip("scipy", reason="needs the plan extra")
    trace = Trace(np.arange(50.0), np.full(50, 500.0), np.full(50, 100.0), np.full(50, 3.0))
    workloads = tuple(
        Workload(name=name, shape=ModelShape.from_config(configs[name]), trace=trace) for name in ("glm", "qwen3")
    )
    device = Device(count=5, memory_bytes=40 * 2**30, bandwidth_bytes_per_s=1e12)
    plan = make_plan(PlanRequest(workloads=workloads, device=device))
    for model in plan.models:
        owners = owners_in_plan(plan, model.name)
        assert len(owners) == model.num_layers
        for piece in model.ffn:
            assert {owners[layer] for layer in piece.layers} == {piece.rank - 1}
    with pytest.raises(ConfigError, match="no layers of 'x'"):
        owners_in_plan(plan, "x")
    by_expert = make_plan(PlanRequest(workloads=workloads, device=device, split="expert"))
    with pytest.raises(ConfigError, match="split is 'expert'"):
        owners_in_plan(by_expert, "glm")


def test_config_is_checked() -> None:
    for options, message in (
        ({"max_batch": 17}, "max_batch must be at least 1 and at most 16"),
        ({"ffn_ranks": 9}, "ffn_ranks"),
        ({"in_flight": 0}, "in_flight"),
        ({"cores": (0,)}, "cores names 1 CPUs, there are 2 workers"),
        ({"kv_budget": 100}, "holds no page"),
        ({"deadline_s": 0.0}, "deadline_s"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig(**{"kv_budget": "1GiB", **options})  # type: ignore[arg-type]
