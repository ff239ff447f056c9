"""Whole plans: the paper's placement, refusals with their numbers, files that are read back or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy", reason="needs the plan extra")

from poolweave.crosspool_engine.model_shape import ModelShape
from poolweave.crosspool_engine.planner import (
    Device,
    Plan,
    PlanRequest,
    Trace,
    Workload,
    explain,
    load_plan,
    make_plan,
    read_trace,
    save_plan,
)
from poolweave.errors import ConfigError, PlanInfeasible

A100 = Device(count=5, memory_bytes=40 * 2**30, bandwidth_bytes_per_s=1.555e12)
THREE = ("qwen3", "glm", "deepseek")


def made_trace(seed: int = 0, scale: float = 1.0) -> Trace:
    rng = np.random.default_rng(seed)
    n = 400
    output = rng.integers(50, 500, n).astype(float)
    return Trace(rng.exponential(2.0, n).cumsum(), scale * rng.integers(100, 4000, n), output, output * 0.03)


def request(configs: dict[str, Any], trace: Trace, device: Device = A100, **settings: Any) -> PlanRequest:
    workloads = tuple(
        Workload(name=name, shape=ModelShape.from_config(configs[name]), trace=trace.at_rate(0.5)) for name in THREE
    )
    return PlanRequest(workloads=workloads, device=device, **settings)


@pytest.fixture(scope="module")
def plan(configs: dict[str, Any]) -> Plan:
    return make_plan(request(configs, made_trace()))


def test_five_a100_give_the_papers_placement(plan: Plan) -> None:
    assert plan.roles == ("KV", "W", "W", "W", "W")
    assert [round(plan.rank_ffn_bytes(r) / 1e9) for r in plan.weights_ranks] == [36, 36, 36, 36]
    assert all(model.attention_ranks == ((0,),) and model.pool_share == 1.0 for model in plan.models)


def test_the_papers_placement_from_published_traces(configs: dict[str, Any], recorded: Callable[..., Path]) -> None:
    trace = read_trace(recorded("AzureLLMInferenceTrace_conv.csv.xz"), token_s=0.027)  # 111 token/s over 3 models
    got = make_plan(request(configs, trace))
    assert got.roles == ("KV", "W", "W", "W", "W")
    assert abs(got.mean_bytes - got.little_bytes) < 0.02 * got.little_bytes


def test_budget_holds_the_percentile_and_the_largest_request(plan: Plan) -> None:
    pool = plan.total_pages * plan.page_bytes
    assert plan.high_bytes <= pool <= plan.high_bytes + 4 * plan.page_bytes
    assert all(model.largest_request_pages <= plan.total_pages for model in plan.models)


def test_a_request_larger_than_the_percentile_sets_the_budget(configs: dict[str, Any]) -> None:
    rare = Trace(np.arange(1000.0), np.r_[np.full(999, 10.0), 30_000.0], np.full(1000, 5.0), np.full(1000, 0.01))
    plan = make_plan(request(configs, rare))
    assert plan.high_bytes < plan.models[0].largest_request_pages * plan.page_bytes
    assert plan.total_pages >= plan.models[0].largest_request_pages


@pytest.mark.parametrize("split", ["layer", "expert"])
def test_every_ffn_weight_is_placed_once(configs: dict[str, Any], split: str) -> None:
    plan = make_plan(request(configs, made_trace(), split=split))
    for model in plan.models:
        shape = ModelShape.from_config(configs[model.name])
        assert sum(piece.nbytes for piece in model.ffn) == 2 * shape.ffn_params
    assert max(plan.rank_ffn_bytes(r) for r in plan.weights_ranks) <= A100.usable_bytes


def test_more_demand_takes_more_kv_ranks(configs: dict[str, Any]) -> None:
    eight = Device(count=8, memory_bytes=40 * 2**30, bandwidth_bytes_per_s=1.555e12)
    plan = make_plan(request(configs, made_trace(scale=12.0), device=eight))
    assert plan.roles == ("KV",) * 2 + ("W",) * 6
    shares = {model.name: model.pool_share for model in plan.models}
    assert shares["qwen3"] == 1.0  # 4 heads over 2 ranks


def test_weights_that_do_not_fit_are_refused_with_numbers(configs: dict[str, Any]) -> None:
    four = Device(count=4, memory_bytes=40 * 2**30, bandwidth_bytes_per_s=1.555e12)
    with pytest.raises(PlanInfeasible, match="FFN weights need 144,4") as caught:
        make_plan(request(configs, made_trace(), device=four))
    assert caught.value.part == "weights"
    assert caught.value.available_bytes == 3 * four.usable_bytes


def test_demand_that_does_not_fit_is_refused_with_numbers(configs: dict[str, Any]) -> None:
    with pytest.raises(PlanInfeasible) as caught:
        make_plan(request(configs, made_trace(scale=40.0)))
    assert caught.value.part in ("kv", "request")
    assert caught.value.needed_bytes > caught.value.available_bytes


def test_the_same_request_gives_the_same_plan(configs: dict[str, Any], plan: Plan) -> None:
    assert make_plan(request(configs, made_trace())) == plan


def test_files_come_back_equal(plan: Plan, tmp_path: Path) -> None:
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


SPOILT: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "unknown field": lambda plan, model: plan.update(colour=1),
    "missing field": lambda plan, model: plan.pop("page_bytes"),
    "version": lambda plan, model: plan.update(version=99),
    "both roles": lambda plan, model: plan["weights_ranks"].append(0),
    "layer twice": lambda plan, model: model["ffn"][0]["layers"].append(model["ffn"][1]["layers"][0]),
    "layer missing": lambda plan, model: model["ffn"][0]["layers"].pop(),
    "ffn on kv": lambda plan, model: model["ffn"][0].update(rank=0),
    "attention on weights": lambda plan, model: model.update(attention_ranks=[[1]]),
    "pages": lambda plan, model: plan.update(pages_per_rank=[1, 2]),
    "interval": lambda plan, model: plan.update(low_bytes=plan["high_bytes"] + 1),
    "name twice": lambda plan, model: plan["models"][1].update(name=model["name"]),
}


@pytest.mark.parametrize("change", SPOILT)
def test_files_that_contradict_themselves_are_refused(plan: Plan, tmp_path: Path, change: str) -> None:
    save_plan(plan, tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    SPOILT[change](document, document["models"][0])
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"plan\.json is no plan"):
        load_plan(tmp_path / "plan.json")


def test_explanation_says_what_was_chosen_and_why(plan: Plan) -> None:
    text = explain(plan)
    assert "Devices: KV W W W W" in text
    assert "by Little's law" in text
    assert "98,304 KV bytes a token" in text
    assert "one request reaches 100% of the pool" in text
    assert text.count("Weights rank") == 4
    assert max(map(len, text.splitlines())) < 600


def test_experts_are_explained_as_spans(configs: dict[str, Any]) -> None:
    text = explain(make_plan(request(configs, made_trace(), split="expert")))
    assert "routers, shared experts and dense layers" in text
    assert "experts 0-" in text


def test_requests_are_checked(configs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="at least 2 devices"):
        Device(count=1, memory_bytes=1, bandwidth_bytes_per_s=1.0)
    with pytest.raises(ConfigError, match="reserve"):
        Device(count=2, memory_bytes=1, bandwidth_bytes_per_s=1.0, reserve=1.0)
    workload = request(configs, made_trace()).workloads[0]
    with pytest.raises(ConfigError, match="names of their own"):
        PlanRequest(workloads=(workload, workload), device=A100)
    with pytest.raises(ConfigError, match="split"):
        PlanRequest(workloads=(workload,), device=A100, split="head")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="block_tokens"):
        PlanRequest(workloads=(workload,), device=A100, block_tokens=0)
