"""Torch weights as the arrays that the native core borrows, without a copy: float32, or bfloat16 shown as uint16."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from poolweave.errors import ConfigError

Array: TypeAlias = "npt.NDArray[Any]"


def as_matrix(name: str, weight: torch.Tensor) -> Array:
    """A weight of two or more axes. Raises ConfigError naming it for another dtype, a meta tensor, NaN or infinity."""
    if weight.device.type == "meta":
        raise ConfigError(f"{name} is missing from the checkpoint", setting=name)
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(
            f"{name} is {weight.dtype}; weights are decoded in float32 or bfloat16", setting=name,
            value=str(weight.dtype),
        )  # fmt: skip
    if not bool(torch.isfinite(weight).all()):
        raise ConfigError(f"{name} holds NaN or infinity", setting=name)
    held = weight.detach().contiguous()
    array: Array = held.view(torch.int16).numpy() if held.dtype == torch.bfloat16 else held.numpy()
    return array.view(np.uint16) if held.dtype == torch.bfloat16 else array


def as_vector(name: str, weight: torch.Tensor | None) -> Array | None:
    """A bias, norm weight or other row, widened to float32; None stays None. Raises as `as_matrix`."""
    if weight is None:
        return None
    if weight.device.type == "meta":
        raise ConfigError(f"{name} is missing from the checkpoint", setting=name)
    held = weight.detach().to(torch.float32).contiguous()
    if not bool(torch.isfinite(held).all()):
        raise ConfigError(f"{name} holds NaN or infinity", setting=name)
    array: Array = held.numpy()
    return array


def linear(into: dict[str, Any], key: str, name: str, module: Any) -> None:
    """Enter a torch linear layer under `key`, its bias under `key`_bias."""
    into[key] = as_matrix(f"{name}.weight", module.weight)
    into[f"{key}_bias"] = as_vector(f"{name}.bias", module.bias)


def norm(into: dict[str, Any], key: str, name: str, module: Any) -> None:
    """Enter an RMS norm under `key`, its epsilon under `key`_eps."""
    into[key] = as_vector(f"{name}.weight", module.weight)
    into[f"{key}_eps"] = float(module.variance_epsilon)
