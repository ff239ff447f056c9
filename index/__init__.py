"""From prompt tokens to blocks: the radix index and whose prefixes it holds."""

from poolweave.index.identity import Identity

__all__ = ["Identity"]
