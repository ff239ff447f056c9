"""A radix index that tells what it holds: every block that it takes or gives up becomes a KV event.

Payloads must be unique, as block handles are: one that is given up is named by the key under which it was stored.
Identities other than the default appear in events as a salt that is their digest, never their fields.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from poolweave.index._native import EvictFilter, Inserted, Match, MissReason
from poolweave.index.events.publisher import KVEventPublisher
from poolweave.index.events.wire import MEDIA, BlockRemoved, BlockStored, Event
from poolweave.index.identity import Identity
from poolweave.index.keys import NO_PARENT, block_keys, short_keys
from poolweave.index.radix import Payloads, RadixIndex, as_payloads
from poolweave.types import Tier, TokenIds, UInt64Array, as_tokens


class RecordedIndex:
    """`index` and `publisher` stay the caller's. Thread-safe; events go out in the order of the changes."""

    def __init__(self, index: RadixIndex, publisher: KVEventPublisher, *, tier: Tier = Tier.HBM) -> None:
        self._index = index
        self._publisher = publisher
        self._medium = MEDIA[tier]
        self._lock = threading.Lock()
        self._names: dict[int, int] = {}  # payload -> its block's hash in events
        self._digests: dict[int, bytes] = {}

    def namespace(self, identity: Identity) -> int:
        ns = self._index.namespace(identity)
        self._digests[ns] = identity.digest
        return ns

    def insert(self, tokens: TokenIds, blocks: Payloads, ns: int = 0, *, priority: int = 0) -> Inserted:
        """As `RadixIndex.insert`; what is new is published, and before it what made room."""
        array, payloads = as_tokens(tokens), as_payloads(blocks)
        with self._lock:
            result = self._index.insert(array, payloads, ns, priority=priority)
            events = self._removed(result.evicted)
            if result.num_new:
                end = result.num_tokens // self._index.block_tokens
                events.append(self._stored(array[: result.num_tokens].tolist(), payloads[:end], ns, result.num_new))
            self._publish(events)
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

    def _stored(self, tokens: list[int], payloads: UInt64Array, ns: int, num_new: int) -> BlockStored:
        digest = self._digests.get(ns)
        hashes = short_keys(block_keys(tokens, self._index.block_tokens, parent=digest or NO_PARENT)).tolist()
        first = len(hashes) - num_new
        self._names.update(zip(payloads[first:].tolist(), hashes[first:], strict=True))
        return BlockStored(
            block_hashes=hashes[first:],
            parent_block_hash=hashes[first - 1] if first else None,
            token_ids=tokens[first * self._index.block_tokens :],
            block_size=self._index.block_tokens,
            lora_id=None,
            medium=self._medium,
            cache_salt=None if digest is None else digest.hex(),
        )

    def _removed(self, payloads: UInt64Array) -> list[Event]:
        hashes = [self._names.pop(payload) for payload in payloads.tolist()]
        return [BlockRemoved(block_hashes=hashes, medium=self._medium)] if hashes else []

    def _give_up(self, payloads: UInt64Array) -> UInt64Array:
        self._publish(self._removed(payloads))
        return payloads

    def _publish(self, events: Sequence[Event]) -> None:
        if events:
            self._publisher.publish(events)
