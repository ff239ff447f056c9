"""The native core as this room uses it: the only file here that imports `poolweave._core`."""

from poolweave._core import (
    Abort,
    Extents,
    Grid,
    Outcome,
    Pull,
    StreamServer,
    Tiers,
    Window,
    Wire,
    copy_blocks,
    hash_blocks,
    pull_blocks,
    store_word,
)

__all__ = [
    "Abort",
    "Extents",
    "Grid",
    "Outcome",
    "Pull",
    "StreamServer",
    "Tiers",
    "Window",
    "Wire",
    "copy_blocks",
    "hash_blocks",
    "pull_blocks",
    "store_word",
]
