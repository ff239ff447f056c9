"""The native core, as far as this room uses it."""

from poolweave._core import (
    Arena,
    BlockCatalogue,
    Blocks,
    BlockTable,
    Device,
    Intake,
    Range,
    TierGeometry,
    Want,
    device_array,
    swap_blocks,
)

__all__ = [
    "Arena",
    "BlockCatalogue",
    "BlockTable",
    "Blocks",
    "Device",
    "Intake",
    "Range",
    "TierGeometry",
    "Want",
    "device_array",
    "swap_blocks",
]
