"""Rotary embedding as a config.json describes it: frequencies, and what it does to the softmax's scale.

Fixed frequencies only; types whose frequencies change with the length are refused. Source: transformers'
modeling_rope_utils, whose numbers these are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from poolweave.errors import ConfigError

# How a family stores rotated keys: see csrc/core/decode/rope.hpp.
_HALVES, _INTERLEAVED, _INTERLEAVED_TO_HALVES = 0, 1, 2
_THETA = {"mixtral": 1e6}  # transformers' default where a config names none; 1e4 for the others

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rope:
    """`scale` multiplies sine and cosine, `latent_scale` an MLA's softmax scale."""

    inv_freq: tuple[float, ...]
    scale: float
    form: int
    latent_scale: float


def read_rope(config: Settings, dim: int) -> Rope:
    """Of heads of which `dim` numbers are to turn. Raises ConfigError, naming the type or entry."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = str(given.get("rope_type", given.get("type", "default")))
    if kind not in _KINDS:
        raise ConfigError(f"rope_type {kind!r} is none of {tuple(_KINDS)}", setting="rope_type", value=kind)
    theta = given.get("rope_theta") or config.get("rope_theta") or _THETA.get(config["model_type"], 1e4)
    positions = config.get("max_position_embeddings")
    trained = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings", positions)
    given |= {"original_max_position_embeddings": trained, "max_position_embeddings": positions}
    turned = int(dim * (given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0))
    powers = float(theta) ** (np.arange(0, turned, 2, dtype=np.float64) / turned)
    try:
        inv_freq, scale = _KINDS[kind](powers, given, float(theta))
    except KeyError as error:
        raise ConfigError(f"rope_type {kind!r} needs {error}", setting=str(error.args[0])) from error
    every = given.get("mscale_all_dim") if kind != "default" else None
    latent = _mscale(given["factor"], every) ** 2 if every else 1.0
    return Rope(tuple(inv_freq.astype(np.float32).tolist()), scale, _form(config), latent)


def _form(config: Settings) -> int:
    if config["model_type"] == "deepseek_v2":
        return _INTERLEAVED
    if config["model_type"] == "glm4_moe_lite" and config.get("rope_interleave", True):
        return _INTERLEAVED_TO_HALVES
    return _HALVES


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _default(powers: Any, given: Settings, theta: float) -> tuple[Any, float]:
    return 1.0 / powers, 1.0


def _linear(powers: Any, given: Settings, theta: float) -> tuple[Any, float]:
    return 1.0 / powers / given["factor"], 1.0


def _llama3(powers: Any, given: Settings, theta: float) -> tuple[Any, float]:
    """Long waves are stretched, short ones kept, those between blended."""
    inv_freq = 1.0 / powers
    factor, low, high = given["factor"], given["low_freq_factor"], given["high_freq_factor"]
    turns = given["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq, 1.0


def _yarn(powers: Any, given: Settings, theta: float) -> tuple[Any, float]:
    """Dimensions that turn seldom are stretched, those that turn often kept, with a ramp between."""
    trained, half = given["original_max_position_embeddings"], len(powers)
    factor = given.get("factor") or given["max_position_embeddings"] / trained

    def dimension(rotations: float) -> float:
        return 2 * half * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(given.get("beta_fast") or 32), dimension(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    kept = 1 - np.clip((np.arange(half) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    scale = given.get("attention_factor")
    if scale is None:
        one, every = given.get("mscale"), given.get("mscale_all_dim")
        scale = _mscale(factor, one) / _mscale(factor, every) if one and every else _mscale(factor)
    return (1 - kept) / (factor * powers) + kept / powers, float(scale)


_KINDS: Mapping[str, Callable[[Any, Settings, float], tuple[Any, float]]] = {
    "default": _default,
    "linear": _linear,
    "yarn": _yarn,
    "llama3": _llama3,
}
