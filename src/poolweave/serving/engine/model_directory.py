"""Where a model's files lie: a local Hugging Face directory, or a built-in one. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from poolweave.errors import ModelNotFound
from poolweave.serving.engine.smollm2 import smollm2_directory

BUILT_IN: Mapping[str, Callable[[], Path]] = {"smollm2": smollm2_directory}


def model_directory(path_or_name: str | Path) -> Path:
    """The directory with config and weights. Raises ModelNotFound; a built-in model is unpacked at its first use."""
    built_in = BUILT_IN.get(str(path_or_name))
    if built_in is not None:
        return built_in()
    path = Path(path_or_name)
    if not path.is_dir():
        raise ModelNotFound(
            f"model {str(path)!r} is no directory; give a local Hugging Face model directory or one of "
            f"{sorted(BUILT_IN)}",
            path=str(path),
        )
    for pattern, what in (("config.json", "config.json"), ("*.safetensors", "safetensors weights")):
        if not any(path.glob(pattern)):
            raise ModelNotFound(f"{path} holds no {what}", path=str(path))
    return path
