"""The torch engine: unmodified `transformers` models whose KV lies in a MemPool's blocks.

Names resolve at first use: sequences and settings need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poolweave.serving.engine.config import EngineConfig
    from poolweave.serving.engine.detokenizer import TextStream
    from poolweave.serving.engine.engine import EngineStats, TorchEngine
    from poolweave.serving.engine.models import LoadedModel, load_model
    from poolweave.serving.engine.sequence import Emitted, FinishReason, SamplingParams, Sequence

_HOMES = {
    "Emitted": "sequence",
    "EngineConfig": "config",
    "EngineStats": "engine",
    "FinishReason": "sequence",
    "LoadedModel": "models",
    "SamplingParams": "sequence",
    "Sequence": "sequence",
    "TextStream": "detokenizer",
    "TorchEngine": "engine",
    "load_model": "models",
}
__all__ = [
    "Emitted",
    "EngineConfig",
    "EngineStats",
    "FinishReason",
    "LoadedModel",
    "SamplingParams",
    "Sequence",
    "TextStream",
    "TorchEngine",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
