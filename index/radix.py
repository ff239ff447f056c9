"""The prefix index: from prompt tokens to one 64-bit payload a block, exact, thread-safe, native.

Knows no pool: a payload is whatever its user says (a block handle, a slot, an instance). Source: MemServe §4.3.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from poolweave.errors import ConfigError
from poolweave.index._native import EvictFilter, Inserted, Match, MissReason, RadixStats, RadixTree
from poolweave.index.eviction import RecomputeCost, native_cost, policy_name
from poolweave.index.identity import Identity
from poolweave.index.namespaces import Namespace, Namespaces
from poolweave.types import TokenIds, UInt64Array, as_tokens, parse_bytes

Payloads: TypeAlias = "Sequence[int] | npt.NDArray[Any]"

_INT32 = np.dtype(np.int32)
_UINT64 = np.dtype(np.uint64)
_NS_PER_S = 1_000_000_000


class RadixIndex:
    """An exact prefix index at block granularity.

    Only whole blocks are indexed. Tokens may be lists, tuples, integer arrays or torch tensors; int32 arrays are used
    as they are. Every method is atomic; matches from several threads run in parallel, without the GIL where they
    take long. Times come from `clock` (seconds, monotonic) and are read only when `ttl_s` is set.
    """

    def __init__(
        self,
        block_tokens: int = 16,
        *,
        max_bytes: int | str | None = None,
        max_tenant_bytes: int | str | None = None,
        ttl_s: float | None = None,
        keep_tenants: bool = False,
        eviction: str | RecomputeCost = "lru",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`eviction` is one of EVICTION_POLICIES, or figures for "cost-aware"; a tenant that passes its own cap always
        gives up what it used least recently. Raises ConfigError: `block_tokens` no power of two, a cap below 64 KiB,
        `ttl_s` not positive, no such policy. With `keep_tenants`, evict() and coldest() can be asked for one tenant's.
        """
        if ttl_s is not None and not 0 < ttl_s <= 1e9:
            raise ConfigError(f"ttl_s={ttl_s} is not between 0 and 1e9 seconds", setting="ttl_s", value=ttl_s)
        self._clock = clock if ttl_s is not None else None
        self._tree = RadixTree(
            block_tokens,
            max_bytes=_cap(max_bytes, "max_bytes"),
            max_tenant_bytes=_cap(max_tenant_bytes, "max_tenant_bytes"),
            ttl_ns=0 if ttl_s is None else max(1, int(ttl_s * _NS_PER_S)),
            seed=secrets.randbits(64),  # of the bucket hashes only: nobody can choose prompts that share a bucket
            eviction=policy_name(eviction),
            cost=native_cost(eviction),
            keep_tenants=keep_tenants,
        )
        accounts = keep_tenants or max_tenant_bytes is not None
        self._namespaces = Namespaces(self._tree, keeps_accounts=accounts)

    @property
    def eviction(self) -> str:
        """The name of the policy."""
        return self._tree.eviction

    @property
    def tree(self) -> RadixTree:
        """The native tree, for native code that keeps something else in step with it."""
        return self._tree

    @property
    def block_tokens(self) -> int:
        return self._tree.block_tokens

    def namespace(self, identity: Identity) -> Namespace:
        """The namespace of `identity`, a small int: the same one for equal identities, 0 for none.

        It stands for the identity while somebody has what this returned, or blocks are indexed under it. After that it
        may be given up, and the identity gets another number when it comes again; no number gets another identity.
        """
        return self._namespaces.of_identity(identity)

    def namespace_of(self, digest: bytes, tenant: bytes = b"") -> Namespace:
        """The namespace of the identity with this digest, as a peer names it; `tenant`: whose it is, where it says so
        (Identity.tenant_digest)."""
        return self._namespaces.of_digest(digest, tenant)

    def tenant(self, ns: int) -> bytes:
        """The digest of a namespace's tenant; b"" for 0 and where nobody told it. Raises ConfigError as `require`."""
        return self._namespaces.tenant(ns)

    def digest(self, ns: int) -> bytes | None:
        """Of the identity behind a namespace; None for 0. Raises ConfigError as `require`."""
        return self._namespaces.digest(ns)

    @property
    def namespaces(self) -> Namespaces:
        """For those who keep something by namespace."""
        return self._namespaces

    def require(self, ns: int) -> None:
        """Raises ConfigError for a namespace that namespace() did not give out, or that was given up since."""
        self._namespaces.require(ns)

    def insert(self, tokens: TokenIds, blocks: Payloads, ns: int = 0, *, priority: int = 0) -> Inserted:
        """Index one block for every `block_tokens` of `tokens`; a last partial block of tokens is ignored.

        The result's `duplicates` are the given blocks that were not taken, because those places were indexed already;
        they stay the caller's. `surplus` are those among them that differ from what the index holds. Under a byte cap
        older blocks make room (`evicted`), or fewer than all are taken (`num_tokens`); a time to live that is over
        adds to `evicted` too. Prompts of lower `priority` (0 to 7) are evicted first. Cost O(len(tokens)).
        Raises ConfigError when the number of blocks is not that of the whole blocks of tokens, and, as every call
        with `ns`, for a namespace that `namespace()` did not give out.
        """
        self._namespaces.require(ns)
        if not (isinstance(tokens, np.ndarray) and tokens.dtype is _INT32):
            tokens = as_tokens(tokens)
        if not (isinstance(blocks, np.ndarray) and blocks.dtype is _UINT64):
            blocks = as_payloads(blocks)
        return self._tree.insert(tokens, blocks, ns, priority, self._now_ns())

    def match(self, tokens: TokenIds, ns: int = 0, pin: bool = False, *, touch: bool = True) -> Match:
        """The longest indexed prefix of `tokens`, and why it ends there.

        With `pin`, its blocks (and no others) are kept until the result is closed, best by `with`. `touch=False` does
        not count as a use. Cost O(matched tokens), about that of comparing them.
        """
        self._namespaces.require(ns)
        if not (isinstance(tokens, np.ndarray) and tokens.dtype is _INT32):
            tokens = as_tokens(tokens)
        return self._tree.match(tokens, ns, pin, touch, self._now_ns())

    def match_many(self, prompts: Sequence[TokenIds], ns: int = 0, *, touch: bool = True) -> list[Match]:
        """`match` for each prompt, in one call without the GIL."""
        self._namespaces.require(ns)
        ready = [p if isinstance(p, np.ndarray) and p.dtype is _INT32 else as_tokens(p) for p in prompts]
        return self._tree.match_many(ready, ns, touch, self._now_ns())

    def delete(self, tokens: TokenIds, ns: int = 0, *, filter: EvictFilter | None = None) -> UInt64Array:
        """Give up the blocks of this prompt, from its end upward while no other prompt runs through them.

        Blocks that are pinned, or that `filter` keeps, stay, and all above them. Returns what was given up.
        """
        self._namespaces.require(ns)
        return self._tree.delete(as_tokens(tokens), ns, filter)

    def evict(
        self, num_blocks: int, *, filter: EvictFilter | None = None, tenant_of: int | None = None
    ) -> UInt64Array:  # fmt: skip
        """Give up to `num_blocks` blocks up: lowest priority first, then as the policy says, leaves from their ends.

        Cost O(blocks given up + runs passed over); log(runs) more a run where the policy is not LRU.
        With `tenant_of` only of the tenant of this namespace, least recently used first; needs `keep_tenants`.
        """
        if tenant_of is not None:
            return self._tree.evict_tenant(tenant_of, _count(num_blocks), filter)
        return self._tree.evict(_count(num_blocks), filter)

    def coldest(
        self, num_blocks: int, *, filter: EvictFilter | None = None, tenant_of: int | None = None
    ) -> UInt64Array:  # fmt: skip
        """The blocks that `evict` would come to first, without giving them up; inner blocks count too."""
        if tenant_of is not None:
            return self._tree.coldest_tenant(tenant_of, _count(num_blocks), filter)
        return self._tree.coldest(_count(num_blocks), filter)

    def expire(self) -> UInt64Array:
        """Give up what was not used for `ttl_s`. Expired blocks never match, also before this call."""
        return self._tree.expire(self._now_ns())

    def clear(self, ns: int | None = None, *, reason: MissReason = MissReason.DELETED) -> UInt64Array:
        """Give up everything (of one namespace) that is not pinned; later misses report `reason`."""
        return self._tree.clear_all(reason) if ns is None else self._tree.clear(ns, reason)

    def mark(self, tokens: TokenIds, reason: MissReason, ns: int = 0) -> None:
        """Let later misses at blocks of this prompt report `reason`, until they are stored or others are marked."""
        self._tree.mark(as_tokens(tokens), ns, reason)

    def tenant_bytes(self, ns: int = 0) -> int:
        """What the tenant of this namespace takes of its `max_tenant_bytes`."""
        return self._tree.tenant_bytes(ns)

    def stats(self) -> RadixStats:
        return self._tree.stats()

    def check(self) -> None:
        """Assert every invariant of the index. Cost O(index)."""
        fault = self._tree.check()
        assert not fault, fault

    def __len__(self) -> int:
        """Blocks indexed."""
        return len(self._tree)

    def _now_ns(self) -> int:
        return 0 if self._clock is None else int(self._clock() * _NS_PER_S)


def as_payloads(blocks: Payloads) -> UInt64Array:
    """`blocks` as a contiguous uint64 array. Raises TypeError for other than integers, ValueError for negative ones."""
    raw = np.asarray(blocks)
    if raw.size == 0:
        return np.empty(0, np.uint64)
    if raw.dtype.kind not in "iu":
        raise TypeError(f"blocks must be integers, got {raw.dtype}")
    if raw.dtype.kind == "i" and raw.min() < 0:
        raise ValueError(f"blocks must not be negative, got {int(raw.min())}")
    return np.ascontiguousarray(raw, dtype=np.uint64)


def _cap(size: int | str | None, setting: str) -> int:
    return 0 if size is None else max(1, parse_bytes(size, setting))


def _count(num_blocks: int) -> int:
    if num_blocks < 0:
        raise ValueError(f"num_blocks must not be negative, got {num_blocks}")
    return num_blocks
