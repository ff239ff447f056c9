"""From prompt tokens to blocks: the radix index and whose prefixes it holds."""

from poolweave.index._native import Inserted, Match, MissReason, RadixStats
from poolweave.index.eviction import EVICTION_POLICIES, RecomputeCost
from poolweave.index.identity import Identity, tenant_digest
from poolweave.index.keys import block_keys
from poolweave.index.namespaces import Namespace
from poolweave.index.radix import RadixIndex

__all__ = [
    "EVICTION_POLICIES",
    "Identity",
    "Inserted",
    "Match",
    "MissReason",
    "Namespace",
    "RadixIndex",
    "RadixStats",
    "RecomputeCost",
    "block_keys",
    "tenant_digest",
]
