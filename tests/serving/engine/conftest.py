"""Small random models on disk, their oracle, and a pool to run them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from poolweave.mempool import MemPool, PoolConfig
from poolweave.serving.engine import LoadedModel, Sequence, TorchEngine, load_model
from poolweave.serving.engine import engine as engine_module
from poolweave.serving.engine.sampler import sample
from poolweave.types import Tier

_BASE = {
    "vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8,
    "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 256}
_MLA = {
    **_MOE, "num_key_value_heads": 8, "n_routed_experts": 8, "n_shared_experts": 1, "kv_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_DEEPSEEK = {**_MLA, "first_k_dense_replace": 1, "topk_method": "greedy"}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 2, "intermediate_size": 256}),
    "llama_small": ("LlamaConfig", {"num_key_value_heads": 2, "intermediate_size": 128, "num_hidden_layers": 1}),
    "mha": ("LlamaConfig", {"num_key_value_heads": 8, "intermediate_size": 256}),
    "qwen3moe": ("Qwen3MoeConfig", {**_MOE, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8}),
    "mixtral": ("MixtralConfig", {"num_key_value_heads": 2, "intermediate_size": 128, "num_local_experts": 4}),
    "deepseek": ("DeepseekV2Config", {**_DEEPSEEK, "q_lora_rank": None}),
    "deepseek_qlora": ("DeepseekV2Config", {**_DEEPSEEK, "q_lora_rank": 48}),
    "glm4lite": ("Glm4MoeLiteConfig", {**_MLA, "q_lora_rank": 48}),
}


def _random_model(name: str, overrides: dict[str, Any]) -> Any:
    kind, settings = _CONFIGS[name]
    config = getattr(transformers, kind)(**{**_BASE, **settings, **overrides})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    return model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A directory with a random model of an architecture, config fields overridden; made once a set of arguments."""

    @cache
    def save(name: str, **overrides: Any) -> Path:
        path = tmp_path_factory.mktemp(name)
        _random_model(name, overrides).save_pretrained(path)
        return path

    return save


@pytest.fixture(scope="session")
def loaded(model_path: Callable[..., Path]) -> Callable[..., LoadedModel]:
    """The same, through load_model; `smollm2` too."""

    @cache
    def load(name: str, **overrides: Any) -> LoadedModel:
        return load_model(name if name == "smollm2" else model_path(name, **overrides))

    return load


@pytest.fixture(scope="session")
def reference(loaded: Callable[..., LoadedModel]) -> Callable[[str], Any]:
    """The same weights under `transformers`' own attention."""

    @cache
    def build(name: str) -> Any:
        source = loaded(name).model
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                deepcopy(source.config), attn_implementation="eager", dtype=source.dtype
            )
        model.load_state_dict(source.state_dict(), assign=True)  # shared, not copied
        for ours, theirs in zip(model.modules(), source.modules(), strict=True):
            ours._non_persistent_buffers_set = theirs._non_persistent_buffers_set
            for key in theirs._non_persistent_buffers_set:
                ours._buffers[key] = theirs._buffers[key]  # RoPE frequencies are not in the state
        return model.eval()

    return build


@pytest.fixture(scope="session")
def greedy(reference: Callable[[str], Any]) -> Callable[..., list[int]]:
    """The oracle: `transformers` generates every token from the whole text, without a cache of any kind."""

    @cache
    def answer(name: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        generated = reference(name).generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=num_tokens,
            do_sample=False, use_cache=False,
        )  # fmt: skip
        return generated[0, len(prompt) :].tolist()

    return answer


@pytest.fixture
def make_pool() -> Iterator[Callable[..., MemPool]]:
    """A pool of exactly `num_blocks` for a model; checked and closed at the end. Its memory starts as NaN."""
    with ExitStack() as stack:

        def make(model: LoadedModel, num_blocks: int = 160, order: str = "aggregated") -> MemPool:
            layout = replace(model.layout, order=order)
            settings = PoolConfig(page_bytes=4096, max_hbm=num_blocks * layout.block_bytes)
            pool = MemPool(layout, hbm=num_blocks * layout.block_bytes, config=settings)
            assert pool.stats().tiers[Tier.HBM].total == num_blocks
            stack.enter_context(pool)
            stack.callback(pool.check)
            pool.view(Tier.HBM)[:num_blocks] = 0xFFFF if layout.dtype == "bfloat16" else np.nan
            return pool

        yield make


@pytest.fixture(scope="session")
def run() -> Callable[..., list[list[int]]]:
    """Add sequences to an engine and step until all have ended; -> their answers."""

    def drive(engine: TorchEngine, *sequences: Sequence) -> list[list[int]]:
        for sequence in sequences:
            engine.add(sequence)
        while engine.has_work:
            engine.step()
            engine.check()
            assert not engine.stalled
        return [sequence.answer for sequence in sequences]

    return drive


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects what each step samples from: [n, vocab] a step that emits."""
    seen: list[Any] = []

    def record(rows: Any, sequences: Any) -> list[int | None]:
        if len(rows):
            seen.append(rows.clone())
        return sample(rows, sequences)

    monkeypatch.setattr(engine_module, "sample", record)
    return seen
