"""The native names that this room uses; nothing else here imports `poolweave._core`."""

from poolweave._core import (
    EventIndexStats,
    EventReport,
    EvictFilter,
    Inserted,
    Match,
    MissReason,
    NativeEventIndex,
    NativeEventStream,
    RadixStats,
    RadixTree,
    RecomputeCost,
    chained_keys,
    eviction_policies,
    kv_event_scope,
)

__all__ = [
    "EventIndexStats",
    "EventReport",
    "EvictFilter",
    "Inserted",
    "Match",
    "MissReason",
    "NativeEventIndex",
    "NativeEventStream",
    "RadixStats",
    "RadixTree",
    "RecomputeCost",
    "chained_keys",
    "eviction_policies",
    "kv_event_scope",
]
