"""Half of an ordinary checkpoint: all but the FFN with a proxy in its place, or nothing but the FFN.

A subclass made for the load swaps modules in its `__init__`; then plain `from_pretrained` reads the directory, so
renames and expert fusing of transformers still work and weights that belong to the other half are never materialised.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from poolweave.errors import ConfigError, ModelNotFound

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FFN_KEYS = r"\.(mlp|block_sparse_moe)\."  # Mixtral's checkpoints call it the latter


class FfnProxy(nn.Module):  # type: ignore[misc]
    """Stands where a layer's `mlp` stood, without a weight. `call(layer, x)`: [1, tokens, hidden] -> the same shape."""

    def __init__(self, layer: int, call: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.layer, x)


def load_attention(
    path: str | Path, *, dtype: str = "float32", call: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """The model in `path` without its FFN weights; a forward calls `call` in their place.

    Without `call` the result is weights to build a native stack from, and its forward raises. `options` go to
    `from_pretrained`. Raises ModelNotFound, or ConfigError for weights that are missing or misshapen.
    """

    def strip(model: Any) -> None:
        for number, layer in enumerate(model.model.layers):
            layer.mlp = FfnProxy(number, call or _no_ffn)

    return _load(path, dtype, strip, FFN_KEYS, options)


def load_ffn(path: str | Path, *, dtype: str = "float32", layers: Collection[int] | None = None) -> tuple[Any, ...]:
    """The `mlp` modules of `layers` (all by default) of the model in `path`, ascending. Raises as `load_attention`."""

    def strip(model: Any) -> None:
        for number, layer in enumerate(model.model.layers):
            for name, _ in list(layer.named_children()):
                if name != "mlp" or (layers is not None and number not in layers):
                    setattr(layer, name, None)
        model.model.embed_tokens = model.model.norm = model.lm_head = None
        model._tied_weights_keys = None
        model.all_tied_weights_keys = {}

    model = _load(path, dtype, strip, r".*", {})
    return tuple(layer.mlp for layer in model.model.layers if layer.mlp is not None)


def _no_ffn(layer: int, x: torch.Tensor) -> torch.Tensor:
    raise ConfigError(f"layer {layer} has no FFN on this side: pass call= to reach the weights pool", setting="call")


def _load(path: str | Path, dtype: str, strip: Callable[[Any], None], foreign: str, options: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is none of {sorted(_DTYPES)}", setting="dtype", value=dtype)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        base = AutoModelForCausalLM._model_mapping[type(config)]
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFound(f"no causal language model in {path}: {error}", path=str(path)) from error
    try:
        model, info = _half(base, strip, foreign).from_pretrained(
            path, config=config, dtype=_DTYPES[dtype], local_files_only=True, output_loading_info=True,
            ignore_mismatched_sizes=True, **options,
        )  # fmt: skip
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be loaded: {error}", setting="model", value=str(path)) from error
    missing, misshapen = sorted(info["missing_keys"]), sorted(info["mismatched_keys"])
    if missing or misshapen:
        first = missing[0] if missing else "{} of shape {} for {}".format(*misshapen[0])
        raise ConfigError(
            f"{path} lacks {len(missing)} weights and has {len(misshapen)} of another shape, first {first}",
            setting="model", value=str(path),
        )  # fmt: skip
    return model.eval()


def _half(base: Any, strip: Callable[[Any], None], foreign: str) -> Any:
    """A subclass of `base` under its own name and module, whose instances are stripped before weights are read."""

    def __init__(self: Any, config: Any) -> None:
        base.__init__(self, config)
        strip(self)

    ignored = [*(base._keys_to_ignore_on_load_unexpected or []), foreign]
    members = {"__init__": __init__, "__module__": base.__module__, "_keys_to_ignore_on_load_unexpected": ignored}
    return type(base.__name__, (base,), members)
