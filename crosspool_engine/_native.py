"""The only door of this room to the native core."""

from __future__ import annotations

from poolweave._core import (
    AttentionStack,
    AttentionWorker,
    Board,
    FfnStack,
    FfnWorker,
    HiddenLink,
    KvView,
    WeightStore,
    kernel_names,
    multiply_adds,
    streaming_read,
)

__all__ = [
    "AttentionStack",
    "AttentionWorker",
    "Board",
    "FfnStack",
    "FfnWorker",
    "HiddenLink",
    "KvView",
    "WeightStore",
    "kernel_names",
    "multiply_adds",
    "streaming_read",
]
