"""Loading a model: any Hugging Face directory with safetensors, or the built-in `smollm2`.

The model is the `transformers` class as it is; what is added here is the KV layout of its blocks, its identity, and
the refusal, by name, of what this engine would get wrong. Nothing is ever downloaded and no remote code is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from poolweave.errors import ConfigError, ModelUnsupported, WeightsMismatch
from poolweave.index import Identity
from poolweave.serving.engine.attention import ATTENTION, PoolCache
from poolweave.serving.engine.batch import Batch, Row
from poolweave.serving.engine.fingerprint import weights_digest
from poolweave.serving.engine.model_directory import model_directory
from poolweave.serving.engine.planes import KVPlanes, torch_dtype
from poolweave.transfer import KVLayout

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_DYNAMIC_ROPE = (
    "dynamic",
    "longrope",
)  # their rotation depends on the length of the whole sequence: KV cannot be reused


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready for TorchEngine, and what its blocks look like. `tokenizer` is None where there is none."""

    model: Any
    tokenizer: Any
    layout: KVLayout
    identity: Identity
    eos_token_ids: tuple[int, ...]
    max_positions: int

    @property
    def vocab(self) -> int:
        """Tokens that it has an embedding for."""
        return int(self.model.get_input_embeddings().num_embeddings)


def load_model(
    path_or_name: str | Path, dtype: str = "float32", device: str = "cpu", *, block_tokens: int = 16
) -> LoadedModel:
    """Load a model directory, or `"smollm2"`.

    Raises ModelNotFound (no directory, config or weights there), ModelUnsupported (sliding window, dynamic RoPE, an
    attention this engine does not implement), WeightsMismatch (missing or misshapen tensors, by name), ConfigError.
    """
    if device != "cpu":
        raise ConfigError(f"device={device!r}: this engine runs on 'cpu'", setting="device", value=device)
    path = model_directory(path_or_name)
    config = _config(path)
    _refuse(config)
    layout = _layout(config, dtype, block_tokens)
    model = _weights(path, config, dtype)
    _probe(model, layout, path)
    return LoadedModel(
        model=model,
        tokenizer=_tokenizer(path),
        layout=layout,
        identity=Identity(
            model=config.model_type, revision=weights_digest(path), layout=layout.fingerprint(), dtype=dtype
        ),
        eos_token_ids=_eos(model),
        max_positions=config.max_position_embeddings,
    )


def _config(path: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelUnsupported(f"{path}/config.json: {error}", model=str(path), feature="config") from error
    return config.get_text_config()


def _refuse(config: Any) -> None:
    """What would run, and give wrong answers on paged or reused KV."""
    refused = ""
    if getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        refused = f"sliding_window={config.sliding_window}"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        refused = f"layers of type {', '.join(sorted(kinds))}"
    rope = str(sorted(_rope_types(getattr(config, "rope_parameters", None) or {})))
    if any(kind in rope for kind in _DYNAMIC_ROPE):
        refused = f"RoPE of type {rope}, which changes with the sequence's length,"
    if refused:
        raise ModelUnsupported(
            f"{config.model_type} with {refused} is not supported", model=config.model_type, feature=refused
        )


def _rope_types(parameters: dict[str, Any]) -> set[str]:
    """All `rope_type`s of a config, of each kind of layer where they differ."""
    nested = [_rope_types(value) for value in parameters.values() if isinstance(value, dict)]
    return {str(parameters.get("rope_type", "default"))}.union(*nested)


def _layout(config: Any, dtype: str, block_tokens: int) -> KVLayout:
    layers = config.num_hidden_layers
    rank = getattr(config, "kv_lora_rank", None)
    if rank is not None:
        rope = config.qk_rope_head_dim
        return KVLayout.mla(num_layers=layers, rank=rank, rope=rope, dtype=dtype, block_tokens=block_tokens)
    heads = config.num_attention_heads
    return KVLayout(
        num_layers=layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=dtype,
        block_tokens=block_tokens,
    )


def _weights(path: Path, config: Any, dtype: str) -> Any:
    try:
        with no_progress_bars():
            model, report = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=torch_dtype(dtype),
                attn_implementation=ATTENTION,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported, and refused below by name
                output_loading_info=True,
            )
    except (SafetensorError, OSError, RuntimeError) as error:
        raise WeightsMismatch(f"cannot read the weights in {path}: {error}", path=str(path)) from error
    except (ValueError, ImportError) as error:  # no such causal model, no such attention
        raise ModelUnsupported(f"{config.model_type}: {error}", model=config.model_type) from error
    missing = sorted(report["missing_keys"])
    misshapen = sorted(str(entry[0]) for entry in report["mismatched_keys"])
    if missing or misshapen:
        raise WeightsMismatch(
            f"the weights in {path} do not fit its config: {len(missing)} missing {missing[:3]}, "
            f"{len(misshapen)} of another shape {misshapen[:3]}",
            path=str(path),
            missing=missing,
            misshapen=misshapen,
        )
    return model.eval()


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """None of transformers' own meanwhile."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _probe(model: Any, layout: KVLayout, path: Path) -> None:
    """One token through the model into a block of its own: does it write all the KV of its layout, and numbers?"""
    kv = np.full(layout.block_bytes, 0xFF, np.uint8)  # NaN in every dtype
    view = layout.view(kv, 1)
    batch = Batch([Row([0], 0, np.zeros(1, np.int32))], KVPlanes(view, layout))
    batch.planes.zero_tails(np.zeros(1, np.int32), np.ones(1, np.int32))
    kind = model.config.model_type
    try:
        with torch.inference_mode():
            logits = model(input_ids=batch.input_ids, position_ids=batch.positions, cache=PoolCache(batch)).logits
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelUnsupported(
            f"{kind} does not run on pool blocks: {error}", model=kind, feature="attention"
        ) from error
    if not bool(logits.isfinite().all()):
        raise WeightsMismatch(f"the model in {path} computes NaN or infinity for its first token", path=str(path))
    row_bytes = layout.plane_bytes // layout.block_tokens
    if (kv.reshape(layout.num_planes, -1)[:, :row_bytes] == 0xFF).all(1).any():
        raise ModelUnsupported(f"{kind} does not write the KV of every layer", model=kind, feature="cache.update")


def _tokenizer(path: Path) -> Any:
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def _eos(model: Any) -> tuple[int, ...]:
    """The tokens that end an answer: the generation config's, which knows of chat turns, before the model config's."""
    sources = (getattr(model.generation_config, "eos_token_id", None), model.config.get_text_config().eos_token_id)
    for eos in sources:
        if eos is not None:
            return (eos,) if isinstance(eos, int) else tuple(eos)
    return ()
