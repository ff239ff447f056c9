"""A plan file becomes an engine's settings and its models' places; what it does not say is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy", reason="needs the plan extra")

from poolweave.crosspool_engine import FfnPlacement, ModelShape, Serving, planned_config
from poolweave.crosspool_engine.planned import planned_serving
from poolweave.crosspool_engine.planner import (
    Device,
    Plan,
    PlanRequest,
    Trace,
    Workload,
    load_plan,
    make_plan,
    save_plan,
)
from poolweave.crosspool_engine.served_model import ServedModel
from poolweave.errors import ConfigError


def planned(configs: dict[str, Any], folder: Path, *, devices: int = 5, scale: float = 1.0) -> Plan:
    """By way of its file."""
    trace = Trace(np.arange(50.0), np.full(50, scale * 500.0), np.full(50, 100.0), np.full(50, 3.0))
    workloads = tuple(
        Workload(name=name, shape=ModelShape.from_config(configs[name]), trace=trace)
        for name in ("glm", "qwen3", "deepseek")
    )
    device = Device(count=devices, memory_bytes=40 * 2**30, bandwidth_bytes_per_s=1e12)
    save_plan(make_plan(PlanRequest(workloads=workloads, device=device)), folder / "plan.json")
    return load_plan(folder / "plan.json")


def directory(configs: dict[str, Any], name: str, folder: Path) -> str:
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps(configs[name]))
    return str(folder / name)


def test_pages_ranks_and_places_are_the_plans(configs: dict[str, Any], tmp_path: Path) -> None:
    plan = planned(configs, tmp_path)
    config = planned_config(plan, max_tokens=4096)
    assert [config.budget_pages(rank) for rank in range(config.attention_ranks)] == list(plan.pages_per_rank)
    assert (config.ffn_ranks, config.max_models, config.block_tokens) == (4, 3, 16)
    serving = planned_serving(plan, "glm", Serving(path=directory(configs, "glm", tmp_path), dtype="bfloat16"))
    model = ServedModel.of("glm", serving, index=0, config=config)
    assert model.ranks == (0,)
    for piece in plan.models[0].ffn:
        assert {model.owners[layer] for layer in piece.layers} == {(piece.rank - 1,)}


def test_what_is_not_as_planned_is_refused(configs: dict[str, Any], tmp_path: Path) -> None:
    plan = planned(configs, tmp_path)
    glm = Serving(path=directory(configs, "glm", tmp_path), dtype="bfloat16")
    other = Serving(path=directory(configs, "llama", tmp_path), dtype="bfloat16")
    shape = ModelShape.from_config(configs["glm"])
    for name, serving, message in (
        ("llama", other, "the plan has no model 'llama'"),
        ("glm", other, "the plan's 'glm' is a glm4_moe_lite"),
        ("glm", Serving(path=glm.path), "54144 KV bytes a token in bfloat16, this one 54144 in float32"),
        ("glm", Serving(path=glm.path, dtype="bfloat16", placement=FfnPlacement.even(shape, 4)), "leave placement"),
    ):
        with pytest.raises(ConfigError, match=message):
            planned_serving(plan, name, serving)
    with pytest.raises(ConfigError, match="the plan says ffn_ranks: leave it out"):
        planned_config(plan, ffn_ranks=2)


def test_attention_over_several_ranks_is_planned_and_enforced(configs: dict[str, Any], tmp_path: Path) -> None:
    """Four KV heads over all KV ranks; latents whole, on as few as hold their demand."""
    plan = planned(configs, tmp_path, devices=8, scale=100.0)
    width = len(plan.kv_ranks)
    assert width > 1
    config = planned_config(plan)
    served = {
        name: ServedModel.of(
            name,
            planned_serving(plan, name, Serving(path=directory(configs, name, tmp_path), dtype="bfloat16")),
            index=0, config=config,
        )
        for name in ("qwen3", "glm")
    }  # fmt: skip
    assert served["qwen3"].replicas == (tuple(range(width)),)
    assert {served["qwen3"].layout_on(rank).kv_heads for rank in range(width)} == {4 // width}
    assert all(len(replica) == 1 for replica in served["glm"].replicas)
    orders = served["qwen3"].orders()
    assert [(orders[rank].share, orders[rank].width) for rank in range(width)] == [(n, width) for n in range(width)]
