"""`poolweave plan`, its file, an engine that enforces it: attention and FFN of one model over several ranks each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("scipy", reason="needs the plan extra")

from ref_decode import decode
from ref_plan import write_plan, write_trace
from ref_transformers import greedy, save_random_model

from poolweave.crosspool_engine import DecodeEngine, DecodeRequest, Serving, planned_config
from poolweave.crosspool_engine.planner import load_plan
from poolweave.errors import ConfigError

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(600)]
NAMES = ("llama", "qwen3moe", "deepseek")
NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models whose KV and weights take two devices each, and a trace."""
    root = tmp_path_factory.mktemp("planned")
    write_trace(root, every_s=0.02)
    for name in NAMES:
        save_random_model(name, root / name, **({"num_experts": 24} if name == "qwen3moe" else {}))
    return root


def workers(engine: DecodeEngine, model: str, prompt: Sequence[int], answer: list[int]) -> set[str]:
    """Those that ran a stage of a request, whose tokens are transformers'."""
    request = DecodeRequest(request_id=model, model=model, tokens=list(prompt), max_new_tokens=NEW)
    before = max((stage.end_ns for stage in engine.stages()), default=0)
    assert decode(engine, [request])[model].tokens.tolist() == answer
    return {stage.worker for stage in engine.stages() if stage.start_ns > before}


@pytest.mark.parametrize("split", ["expert", "layer"])
def test_a_plan_wider_than_one_rank_decodes_the_tokens_of_transformers(folder: Path, split: str) -> None:
    plan = load_plan(write_plan(folder, NAMES, split=split, devices=4, memory="2MiB"))
    models = {model.name: model for model in plan.models}
    assert {name: models[name].attention_ranks for name in ("llama", "qwen3moe")} == dict.fromkeys(
        ("llama", "qwen3moe"), ((0, 1),)
    )
    assert len(models["deepseek"].attention_ranks[0]) == 1, "latents are not split"
    assert {piece.rank for piece in models["qwen3moe"].ffn} == set(plan.weights_ranks) == {2, 3}
    with DecodeEngine(planned_config(plan, max_tokens=128, max_hidden=64, events=2048), plan=plan) as engine:
        assert len(engine.worker_pids()) == 4
        assert [kv.budget_pages for kv in engine.stats().kv] == list(plan.pages_per_rank)
        with pytest.raises(ConfigError, match="the plan has no model 'other'"):
            engine.activate("other", Serving(path=str(folder / "llama")))
        for name in NAMES:
            engine.activate(name, Serving(path=str(folder / name)))
        for name in NAMES:
            prompt = tuple(7 + n for n in range(20))
            ran = workers(engine, name, prompt, greedy(folder / name, prompt, NEW))
            attention = {f"attention-{plan.kv_ranks.index(rank)}" for rank in models[name].attention_ranks[0]}
            ffn = {f"ffn-{plan.weights_ranks.index(piece.rank)}" for piece in models[name].ffn}
            assert ran == attention | ffn, "each rank of the plan, and no other"
        engine.check()
