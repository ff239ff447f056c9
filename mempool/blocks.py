"""Blocks: an ordered list of block handles, a native value. Knows no pool: what a handle means is the pool's affair."""

from poolweave.mempool._native import Blocks

__all__ = ["Blocks"]
