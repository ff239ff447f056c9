"""A radix index that tells what it holds: every block that it takes or gives up becomes a KV event."""

from __future__ import annotations

import threading

from poolweave.index._native import EvictFilter, Inserted, Match, MissReason
from poolweave.index.events.publisher import KVEventPublisher
from poolweave.index.events.recorder import EventRecorder
from poolweave.index.identity import Identity
from poolweave.index.radix import Payloads, RadixIndex, as_payloads
from poolweave.types import Tier, TokenIds, UInt64Array, as_tokens


class RecordedIndex:
    """`index` and `publisher` stay the caller's. Thread-safe; events go out in the order of the changes."""

    def __init__(self, index: RadixIndex, publisher: KVEventPublisher, *, tier: Tier = Tier.HBM) -> None:
        self._index = index
        self._recorder = EventRecorder(publisher)
        self._tier = tier
        self._lock = threading.Lock()

    def namespace(self, identity: Identity) -> int:
        return self._index.namespace(identity)

    def insert(self, tokens: TokenIds, blocks: Payloads, ns: int = 0, *, priority: int = 0) -> Inserted:
        """As `RadixIndex.insert`; what is new is published, and before it what made room."""
        array, payloads = as_tokens(tokens), as_payloads(blocks)
        with self._lock:
            result = self._index.insert(array, payloads, ns, priority=priority)
            self._recorder.removed(result.evicted)
            end = result.num_tokens // self._index.block_tokens
            new = payloads[end - result.num_new : end]
            self._recorder.stored(array[: result.num_tokens], new, [self._tier] * len(new), self._index.digest(ns))
        return result

    def match(self, tokens: TokenIds, ns: int = 0, pin: bool = False, *, touch: bool = True) -> Match:
        return self._index.match(tokens, ns, pin, touch=touch)

    def delete(self, tokens: TokenIds, ns: int = 0, *, filter: EvictFilter | None = None) -> UInt64Array:
        with self._lock:
            return self._give_up(self._index.delete(tokens, ns, filter=filter))

    def evict(self, num_blocks: int, *, filter: EvictFilter | None = None) -> UInt64Array:
        with self._lock:
            return self._give_up(self._index.evict(num_blocks, filter=filter))

    def expire(self) -> UInt64Array:
        with self._lock:
            return self._give_up(self._index.expire())

    def clear(self, ns: int | None = None, *, reason: MissReason = MissReason.DELETED) -> UInt64Array:
        with self._lock:
            return self._give_up(self._index.clear(ns, reason=reason))

    def _give_up(self, payloads: UInt64Array) -> UInt64Array:
        self._recorder.removed(payloads)
        return payloads
