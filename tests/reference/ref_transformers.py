"""Small random models on disk, and what `transformers` itself answers with them: no cache, no pool, no batch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_BASE = {
    "vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"intermediate_size": 128}),
    "qwen3moe": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 8,
         "num_experts_per_tok": 2},
    ),
    "llama_mqa": ("LlamaConfig", {"intermediate_size": 128, "num_key_value_heads": 1}),
    "deepseek": (
        "DeepseekV2Config",
        {"num_key_value_heads": 4, "intermediate_size": 128, "moe_intermediate_size": 32, "n_routed_experts": 4,
         "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 32,
         "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_group": 1,
         "topk_group": 1, "topk_method": "greedy"},
    ),
    "mixtral": ("MixtralConfig", {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip
_SPECIAL = ("<pad>", "<s>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_random_model(kind: str, folder: Path, **overrides: Any) -> Path:
    """A model of that architecture with seeded random weights, as a Hugging Face directory."""
    name, settings = _CONFIGS[kind]
    config = getattr(transformers, name)(**{**_BASE, **settings, **overrides})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    model.save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer with a chat template, for a vocabulary of at least 260, into a model's directory."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate((*_SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="<|im_end|>"
    )
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    return folder


@cache
def _reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


@cache
def greedy(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """The answer to `prompt`, every token computed from the whole text."""
    model = _reference(folder)
    generated = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=num_tokens, do_sample=False,
        use_cache=False, pad_token_id=0,
    )  # fmt: skip
    answer: list[int] = generated[0, len(prompt) :].tolist()
    return answer


def prompt_of(length: int, seed: int = 0, vocabulary: int = 500) -> list[int]:
    """Seeded tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed * 10_007 + length)
    tokens: list[int] = torch.randint(10, vocabulary, (length,), generator=generator).tolist()
    return tokens
