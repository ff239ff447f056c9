"""The native names that this room uses; nothing else here imports `poolweave._core`."""

from poolweave._core import EvictFilter, Inserted, Match, MissReason, RadixStats, RadixTree

__all__ = ["EvictFilter", "Inserted", "Match", "MissReason", "RadixStats", "RadixTree"]
