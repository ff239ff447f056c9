"""Which rank holds which layers and experts: evenly, by hand, and as a plan says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poolweave.crosspool_engine import FfnPart, FfnPlacement, ModelShape
from poolweave.crosspool_engine.planner import Device, Plan, PlanRequest, Trace, Workload
from poolweave.errors import ConfigError


@pytest.fixture(scope="module")
def glm(configs: dict[str, Any]) -> ModelShape:
    return ModelShape.from_config(configs["glm"])


def planned(configs: dict[str, Any], split: Any) -> Plan:
    pytest.importorskip("scipy", reason="needs the plan extra")
    from poolweave.crosspool_engine.planner import make_plan

    trace = Trace(np.arange(50.0), np.full(50, 500.0), np.full(50, 100.0), np.full(50, 3.0))
    workloads = tuple(
        Workload(name=name, shape=ModelShape.from_config(configs[name]), trace=trace) for name in ("glm", "qwen3")
    )
    device = Device(count=5, memory_bytes=40 * 2**30, bandwidth_bytes_per_s=1e12)
    return make_plan(PlanRequest(workloads=workloads, device=device, split=split))


def test_layers_are_spread_evenly_and_in_order(glm: ModelShape) -> None:
    placement = FfnPlacement.even(glm, 3)
    placement.check(glm, 3)
    assert [part.layers for part in placement.parts.values()] == [
        tuple(range(16)), tuple(range(16, 32)), tuple(range(32, 47)),
    ]  # fmt: skip
    assert placement.owners(47)[15:17] == ((0,), (1,))


def test_experts_are_spread_evenly_and_what_is_not_routed_stays_together(
    glm: ModelShape, configs: dict[str, Any]
) -> None:
    placement = FfnPlacement.by_expert(glm, 3)
    placement.check(glm, 3)
    assert placement.owners(47)[:2] == ((0,), (0, 1, 2))  # layer 0 is dense
    assert sum(len(part.experts or ()) for part in placement.parts.values()) == 64
    assert [part.unrouted for part in placement.parts.values()] == [True, False, False]
    dense = ModelShape.from_config(configs["llama"])
    assert FfnPlacement.by_expert(dense, 2).owners(40) == ((0,),) * 40


@pytest.mark.parametrize("split", ["layer", "expert"])
def test_a_placement_comes_from_a_plan(configs: dict[str, Any], split: str) -> None:
    plan = planned(configs, split)
    for model in plan.models:
        shape = ModelShape.from_config(configs[model.name])
        placement = FfnPlacement.of_plan(plan, model.name, shape)
        placement.check(shape, len(plan.weights_ranks))
        assert {rank + 1 for rank in placement.parts} == {piece.rank for piece in model.ffn}
    with pytest.raises(ConfigError, match="the plan has no model 'x'"):
        FfnPlacement.of_plan(plan, "x", shape)
    with pytest.raises(
        ConfigError, match="the plan's 'glm' is a glm4_moe_lite of 47 layers, this is a qwen3_moe of 48"
    ):
        FfnPlacement.of_plan(plan, "glm", ModelShape.from_config(configs["qwen3"]))


@pytest.mark.parametrize(
    "parts",
    [
        {0: FfnPart(tuple(range(46)))},
        {0: FfnPart(tuple(range(48)))},
        {0: FfnPart(tuple(range(47))), 1: FfnPart((3,))},
        {0: FfnPart(tuple(range(47)), tuple(range(63)))},
        {0: FfnPart(tuple(range(47)), unrouted=False)},
        {4: FfnPart(tuple(range(47)))},
    ],
    ids=["layer missing", "layer too many", "layer twice", "expert missing", "nothing unrouted", "no such rank"],
)
def test_what_is_not_whole_is_refused(glm: ModelShape, parts: dict[int, FfnPart]) -> None:
    with pytest.raises(ConfigError, match="do not hold each of 47 layers"):
        FfnPlacement(parts).check(glm, 2)
