"""The native core, as far as this room uses it."""

from poolweave._core import Arena, Blocks, BlockTable, Range, TierGeometry, Want, swap_blocks

__all__ = ["Arena", "BlockTable", "Blocks", "Range", "TierGeometry", "Want", "swap_blocks"]
