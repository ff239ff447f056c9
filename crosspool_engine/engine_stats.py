"""What a decode engine has at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from poolweave.crosspool_engine.virtualizer import VirtualizerStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What is here now. `lost`: models that wait for restart() after a worker died."""

    models: tuple[str, ...]
    lost: tuple[str, ...]
    running: int
    waiting: int
    kv: tuple[VirtualizerStats, ...]  # by attention rank
    kv_bytes: int  # that all ranks' ranges hold
    history_blocks: int
