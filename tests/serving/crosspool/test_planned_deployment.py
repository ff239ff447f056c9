"""From traces to answers: a plan is made, a deployment runs from it, and what does not fit it is refused by numbers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("torch")
pytest.importorskip("scipy", reason="needs the plan extra")
pytest.importorskip("fastapi")

from ref_plan import write_plan, write_trace
from ref_transformers import greedy, save_random_model, save_tokenizer

from poolweave.config import from_mapping
from poolweave.crosspool_engine import check_machine
from poolweave.crosspool_engine.planner import load_plan
from poolweave.errors import ConfigError, PlanInfeasible
from poolweave.serving.crosspool.cold_model import read_cold_model
from poolweave.serving.crosspool.config import CrossPoolConfig
from poolweave.serving.deployment import Deployment, DeploymentConfig
from poolweave.serving.door.prompter import load_prompter
from poolweave.serving.instance.config import InstanceConfig
from poolweave.serving.instance.kinds import make_kind
from poolweave.serving.instance.named_model import NamedModel
from poolweave.types import Role

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(900)]
NAMES = ("mixtral", "deepseek")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a trace, and the plan that `poolweave plan` makes of them."""
    root = tmp_path_factory.mktemp("planned")
    write_trace(root, every_s=2.0)
    for name in NAMES:
        save_tokenizer(save_random_model(name, root / name, vocab_size=260))
    write_plan(root, NAMES, split="expert", devices=3, memory="8MiB")
    return root


def named(folder: Path, **paths: str) -> tuple[NamedModel, ...]:
    return tuple(NamedModel(name=name, path=str(folder / paths.get(name, name))) for name in NAMES)


def instance(folder: Path, models: tuple[NamedModel, ...], **changes: Any) -> InstanceConfig:
    config = InstanceConfig(
        name=f"planned-{os.getpid()}", role=Role.DECODE, kind="crosspool", models=models, hbm="4MiB",
        crosspool=CrossPoolConfig(plan=str(folder / "plan.json")),
    )  # fmt: skip
    return replace(config, **changes)


def worker_processes() -> set[int]:
    """Children of this process that are workers, also those of other tests' engines."""
    return {child.pid for child in psutil.Process().children() if "crosspool_engine.worker" in str(child.cmdline())}


def test_what_does_not_fit_the_plan_is_refused_before_any_worker_starts(folder: Path) -> None:
    swapped = named(folder, mixtral="deepseek")
    unplanned = (*named(folder), NamedModel(name="third", path=str(folder / "mixtral")))
    before = worker_processes()
    for models, changes, says in (
        (swapped, {}, "is a mixtral of 2 layers, this is a deepseek_v2 of 2"),
        (unplanned, {}, "third"),
        (named(folder), {"dtype": "bfloat16"}, "in float32, this one .* in bfloat16"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_kind(instance(folder, models, **changes))
    assert worker_processes() == before
    with pytest.raises(ConfigError, match="the plan says kv_budget: leave it out"):
        CrossPoolConfig(plan="plan.json", kv_budget="1MiB")


def test_a_plan_that_the_machine_has_no_memory_for_is_refused_with_the_bytes(folder: Path) -> None:
    plan = load_plan(folder / "plan.json")
    shapes = {one.name: read_cold_model(one.path, "float32").shape for one in named(folder)}
    kv = plan.total_pages * plan.page_bytes
    ffn = sum(shape.ffn_params for shape in shapes.values()) * 4
    rest = sum(shape.resident_params for shape in shapes.values()) * 4
    check_machine(plan, shapes, memory_bytes=kv + ffn + rest)
    with pytest.raises(PlanInfeasible, match=f"{kv:,} of KV, {ffn:,} of FFN weights, {rest:,} of others") as caught:
        check_machine(plan, shapes, memory_bytes=kv + ffn + rest - 1)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (kv + ffn + rest, kv + ffn + rest - 1)
    check_machine(plan, shapes, away=len(plan.weights_ranks), memory_bytes=kv + rest)


@pytest.mark.slow
def test_a_deployment_runs_from_the_plan_and_answers_for_each_model(folder: Path) -> None:
    mapping = {
        "models": [{"name": one.name, "path": one.path} for one in named(folder)],
        "door": {"listen": "127.0.0.1:0", "wait_s": 60.0, "timeout_s": 300.0},
        "instances": [
            {"name": f"p-{os.getpid()}", "role": "prefill", "hbm": "4MiB"},
            {
                "name": f"d-{os.getpid()}", "role": "decode", "kind": "crosspool", "hbm": "4MiB",
                "crosspool": {"plan": str(folder / "plan.json")},
            },
        ],
    }  # fmt: skip
    plan = load_plan(folder / "plan.json")
    with Deployment(from_mapping(mapping, DeploymentConfig)) as made:
        assert httpx.get(f"{made.url}/ready", timeout=60).status_code == 200, "all models can be answered"
        decode = psutil.Process(made.pids[f"d-{os.getpid()}"])
        assert len(decode.children()) == len(plan.kv_ranks) + len(plan.weights_ranks) == 3
        for name in NAMES:
            prompt = [50 + n % 90 for n in range(40)]
            for turn in range(2):
                body = {"model": name, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                got = httpx.post(f"{made.url}/v1/completions", json=body, timeout=300).json()
                answer = greedy(folder / name, tuple(prompt), 8)
                stream = load_prompter(str(folder / name)).stream(prompt)
                for token in answer:
                    stream.append(token)
                stream.flush()
                assert got["choices"][0]["text"] == stream.text, got
                assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == (32 if turn else 0)
                prompt = [*prompt, 61]
