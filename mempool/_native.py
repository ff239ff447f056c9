"""The native core, as far as this room uses it."""

from poolweave._core import Arena, BlockCatalogue, Blocks, BlockTable, Intake, Range, TierGeometry, Want, swap_blocks

__all__ = ["Arena", "BlockCatalogue", "BlockTable", "Blocks", "Intake", "Range", "TierGeometry", "Want", "swap_blocks"]
