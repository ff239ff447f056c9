"""Both native halves, token by token over paged KV, against transformers' own forward, for every architecture."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the engine extra")

import torch
from ref_checkpoint import saved_checkpoint

from poolweave.crosspool_engine._native import AttentionStack, FfnStack, KvView, kernel_names
from poolweave.crosspool_engine.ffn_placement import FfnPart
from poolweave.crosspool_engine.models import build_attention_stack, build_ffn_stack
from poolweave.errors import ConfigError
from poolweave.transfer.layout import KVLayout

pytestmark = pytest.mark.engine
BLOCK = 4
VARIANTS = [
    "llama", "llama-mha-bias", "llama-mqa-tied", "qwen3", "mixtral", "qwen3-moe", "qwen3-moe-unnormalised",
    "deepseek-v2", "deepseek-v2-groups", "glm", "glm-groups",
]  # fmt: skip
LATENT = [name for name in VARIANTS if name.startswith(("deepseek", "glm"))]


def layout_of(config: Any, **options: Any) -> KVLayout:
    if hasattr(config, "kv_lora_rank"):
        return KVLayout.mla(
            num_layers=config.num_hidden_layers, rank=config.kv_lora_rank, rope=config.qk_rope_head_dim,
            block_tokens=BLOCK, **options,
        )  # fmt: skip
    return KVLayout(
        num_layers=config.num_hidden_layers, kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads, block_tokens=BLOCK, **options,
    )  # fmt: skip


class Decoder:
    """Sequences decoded in one process: attention, then FFN, layer by layer. Slots are drawn in no order."""

    def __init__(self, model: Any, *, kernels: str = "auto", slots: int = 64, **layout: Any) -> None:
        with saved_checkpoint(model, str(model.dtype).removeprefix("torch.")) as checkpoint:
            self.attention: AttentionStack = build_attention_stack(checkpoint, kernels=kernels)
            self.ffn: FfnStack = build_ffn_stack(checkpoint, kernels=kernels)
        self.layout = layout_of(model.config, **{"dtype": "float32", **layout})
        self.memory = self.layout.view(np.full(slots * self.layout.block_bytes, 0, np.uint8), slots)
        self.kv = KvView(self.memory)
        self.free = list(np.random.default_rng(1).permutation(slots))
        self.tables: list[list[int]] = []
        self.positions: list[int] = []
        self.hidden, self.vocab = model.config.hidden_size, model.config.vocab_size

    def open(self) -> int:
        self.tables.append([])
        self.positions.append(0)
        return len(self.tables) - 1

    def step(self, rows: list[int], tokens: list[int]) -> np.ndarray[Any, Any]:
        """One token of each of `rows`; -> logits [rows, vocab]."""
        for row in rows:
            if self.positions[row] % BLOCK == 0:
                self.tables[row].append(int(self.free.pop()))
        width = max(len(self.tables[row]) for row in rows)
        slots = np.array([self.tables[r] + [-1] * (width - len(self.tables[r])) for r in rows], np.int32)
        positions = np.array([self.positions[row] for row in rows], np.int32)
        residual, normed, out = (np.empty((len(rows), self.hidden), np.float32) for _ in range(3))
        delta = None
        self.attention.embed(np.array(tokens, np.int32), residual)
        for layer in range(self.attention.num_layers):
            self.attention.attend(layer, self.kv, positions, slots, delta, residual, normed)
            self.ffn.forward(layer, normed, out)
            delta = out
        logits = np.empty((len(rows), self.vocab), np.float32)
        self.attention.logits(delta, residual, logits)
        for row in rows:
            self.positions[row] += 1
        return logits

    def run(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        row = self.open()
        return np.concatenate([self.step([row], [token]) for token in tokens])


def reference(model: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        logits: np.ndarray[Any, Any] = model(torch.tensor([tokens])).logits[0].float().numpy()
    return logits


def prompt(seed: int, n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 199, n)]


@pytest.mark.parametrize("kernels", kernel_names())
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_at_every_position(tiny: Callable[..., Any], variant: str, kernels: str) -> None:
    model = tiny(variant)
    tokens = prompt(0, 23)
    want, got = reference(model, tokens), Decoder(model, kernels=kernels).run(tokens)
    assert np.abs(want).max() > 0.5  # the comparison is not of zeros
    np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_zeroed_block_shows(tiny: Callable[..., Any], variant: str) -> None:
    """The negative control: attention really reads the pool."""
    model = tiny(variant)
    tokens = prompt(0, 13)
    decoder = Decoder(model)
    row = decoder.open()
    for token in tokens[:-1]:
        decoder.step([row], [token])
    decoder.memory[decoder.tables[row][0]] = 0
    got = decoder.step([row], [tokens[-1]])
    assert np.abs(got[0] - reference(model, tokens)[-1]).max() > 1e-3


@pytest.mark.parametrize("variant", LATENT)
def test_absorbed_latents_within_1e_5_of_the_expanded_form(tiny: Callable[..., Any], variant: str) -> None:
    """One attention layer alone, over a cache that transformers filled, against its expanded keys and values."""
    from transformers import DynamicCache

    model = tiny(variant)
    tokens = prompt(3, 30)
    layer = model.model.layers[0]
    with torch.inference_mode():
        hidden = model.model.embed_tokens(torch.tensor([tokens]))
        rope = model.model.rotary_emb(hidden, torch.arange(30)[None])
        mask = torch.full((30, 30), float("-inf")).triu(1)[None, None]
        cache = DynamicCache(config=model.config)
        attended, _ = layer.self_attn(
            layer.input_layernorm(hidden), position_embeddings=rope, attention_mask=mask, cache=cache
        )
        want = layer.post_attention_layernorm(hidden + attended)[0, -1].numpy()
        latents = torch.cat((cache.layers[0].keys, cache.layers[0].values), -1)[0, 0].numpy()  # [30, rank + rope]
    decoder = Decoder(model)
    slots = np.array([[9, 3, 17, 5, 40, 2, 11, 60]], np.int32)
    for t in range(29):
        decoder.memory[slots[0, t // BLOCK], 0, 0, t % BLOCK, 0] = latents[t]
    residual, normed = np.empty((1, 72), np.float32), np.empty((1, 72), np.float32)
    decoder.attention.embed(np.array(tokens[-1:], np.int32), residual)
    decoder.attention.attend(0, decoder.kv, np.array([29], np.int32), slots, None, residual, normed)
    np.testing.assert_allclose(normed[0], want, atol=1e-5)
    np.testing.assert_allclose(decoder.memory[slots[0, 7], 0, 0, 1, 0], latents[29], atol=1e-5)  # the row it wrote


@pytest.mark.parametrize("variant", VARIANTS)
def test_kv_rows_are_what_transformers_caches(tiny: Callable[..., Any], variant: str) -> None:
    """So KV that a torch engine computed continues here, and the other way round."""
    from transformers import DynamicCache

    model = tiny(variant)
    tokens = prompt(5, 11)
    decoder = Decoder(model)
    decoder.run(tokens)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([tokens]), cache=cache)
    for number, layer in enumerate(cache.layers):
        parts = [layer.keys, layer.values]
        if len(decoder.layout.parts) == 1:
            parts = [torch.cat(parts, -1)]
        for part, cached in enumerate(parts):
            got = np.stack([decoder.memory[decoder.tables[0][t // BLOCK], number, part, t % BLOCK] for t in range(11)])
            np.testing.assert_allclose(got, cached[0].transpose(0, 1).numpy(), atol=1e-5)


@pytest.mark.parametrize("kernels", kernel_names())
@pytest.mark.parametrize("variant", ["qwen3-moe", "mixtral", "deepseek-v2", "glm-groups", "llama-mha-bias"])
def test_a_sequence_decodes_to_the_same_bits_in_any_batch(tiny: Callable[..., Any], variant: str, kernels: str) -> None:
    model = tiny(variant)
    prompts = [prompt(seed, 9) for seed in range(6)]
    alone = [Decoder(model, kernels=kernels).run(tokens) for tokens in prompts]
    decoder = Decoder(model, kernels=kernels)
    rows = [decoder.open() for _ in prompts]
    rng = np.random.default_rng(4)
    while any(decoder.positions[row] < 9 for row in rows):
        waiting = [row for row in rows if decoder.positions[row] < 9]
        batch = [int(r) for r in rng.permutation(waiting)[: rng.integers(1, 7)]]
        at = [decoder.positions[row] for row in batch]
        got = decoder.step(batch, [prompts[row][t] for row, t in zip(batch, at, strict=True)])
        for logits, row, t in zip(got, batch, at, strict=True):
            assert logits.tobytes() == alone[row][t].tobytes()


@pytest.mark.parametrize("order", ["aggregated", "layered"])
def test_both_orders_of_planes(tiny: Callable[..., Any], order: str) -> None:
    model = tiny("qwen3-moe")
    tokens = prompt(2, 9)
    np.testing.assert_allclose(Decoder(model, order=order).run(tokens), reference(model, tokens), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["qwen3-moe", "deepseek-v2", "glm", "llama-mqa-tied"])
def test_bf16_weights_and_kv(tiny: Callable[..., Any], variant: str) -> None:
    """Against the float32 model of the same rounded weights: only the KV is rounded on our side."""
    model = tiny(variant)
    rotary = copy.deepcopy(model.model.rotary_emb)
    model = model.to(torch.bfloat16)
    model.model.rotary_emb = rotary  # loaded in bfloat16, frequencies stay as they are
    tokens = prompt(6, 17)
    got = Decoder(model, dtype="bfloat16").run(tokens)
    exact = Decoder(model, dtype="float32").run(tokens)
    want = reference(model.float(), tokens)
    np.testing.assert_allclose(exact, want, atol=2e-5, rtol=1e-5)
    assert 0 < np.abs(got - want).max() < 0.05 * np.abs(want).max()


@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe-unnormalised", "deepseek-v2-groups", "glm", "glm-groups"])
def test_routing_with_random_gates(tiny: Callable[..., Any], variant: str) -> None:
    """Many tokens through one mixture: each goes to the experts that transformers picks, with its weights."""
    model = tiny(variant)
    mlp = model.model.layers[2].mlp
    x = torch.randn(500, 72, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want = mlp(x[None])[0].numpy()
    out = np.empty((500, 72), np.float32)
    with saved_checkpoint(model) as checkpoint:
        build_ffn_stack(checkpoint, FfnPart((2,))).forward(0, x.numpy(), out)
    np.testing.assert_allclose(out, want, atol=2e-5, rtol=1e-5)
    with torch.inference_mode():
        used = mlp.gate(x)[2].unique()
    assert len(used) == len(mlp.experts.down_proj)  # every expert was needed


def test_what_cannot_be_decoded_is_refused_by_name(tiny: Callable[..., Any]) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for variant, overrides, build, message in (
        ("mixtral", {"sliding_window": 64}, build_attention_stack, "sliding_window 64"),
        ("llama", {"rope_parameters": rope}, build_attention_stack, "rope_type 'dynamic'"),
        ("llama", {"hidden_act": "gelu"}, build_ffn_stack, "hidden_act 'gelu'"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, build_ffn_stack, "topk_method 'noaux_tc'"),
    ):
        with saved_checkpoint(tiny(variant, **overrides)) as checkpoint, pytest.raises(ConfigError, match=message):
            build(checkpoint)
    with saved_checkpoint(tiny("llama")) as checkpoint, pytest.raises(ConfigError, match="kernels 'mmx'"):
        build_attention_stack(checkpoint, kernels="mmx")


def test_calls_that_do_not_fit_are_refused(tiny: Callable[..., Any]) -> None:
    decoder = Decoder(tiny("llama"))
    rows = np.zeros((1, 72), np.float32)
    position, slots = np.array([0], np.int32), np.array([[0]], np.int32)
    with pytest.raises(ConfigError, match="token 199 of a vocabulary of 199"):
        decoder.attention.embed(np.array([199], np.int32), rows)
    with pytest.raises(ConfigError, match="attention layer 3 of 3"):
        decoder.attention.attend(3, decoder.kv, position, slots, None, rows, rows.copy())
    with pytest.raises(ConfigError, match="names slot 64 of 64"):
        decoder.attention.attend(0, decoder.kv, position, slots + 64, None, rows, rows.copy())
    with pytest.raises(ConfigError, match="at position 4 has 1 blocks"):
        decoder.attention.attend(0, decoder.kv, position + 4, slots, None, rows, rows.copy())
    with pytest.raises(ConfigError, match="an array is 2 x 72, the batch 1 x 72"):
        decoder.attention.attend(0, decoder.kv, position, slots, None, np.zeros((2, 72), np.float32), rows)
    with pytest.raises(ConfigError, match="FFN layer -1 of 3"):
        decoder.ffn.forward(-1, rows, rows.copy())
    other = KvView(np.zeros((1, 3, 1, 4, 1, 48), np.float32))
    with pytest.raises(ConfigError, match="KV of 1 parts of 1 x 48, attention keeps 2 of 2 x 20"):
        decoder.attention.attend(0, other, position, slots, None, rows, rows.copy())
    with pytest.raises(ConfigError, match="float32 or bfloat16"):
        KvView(np.zeros((1, 3, 2, 4, 2, 20), np.float16))
