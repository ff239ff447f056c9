"""From prompt tokens to blocks: the radix index and whose prefixes it holds."""

from poolweave.index._native import Inserted, Match, MissReason, RadixStats
from poolweave.index.identity import Identity
from poolweave.index.keys import block_keys
from poolweave.index.radix import RadixIndex

__all__ = ["Identity", "Inserted", "Match", "MissReason", "RadixIndex", "RadixStats", "block_keys"]
