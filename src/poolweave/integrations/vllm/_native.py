"""The native core as this room uses it: the only file here that imports `poolweave._core`."""

from poolweave._core import TierGeometry, swap_planes

__all__ = ["TierGeometry", "swap_planes"]
