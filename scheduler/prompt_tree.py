"""Which instances hold which prompt prefixes, as far as the scheduler knows. Source: MemServe §6, Fig. 5.

A prompt tree is a hint: instances evict without telling, events get lost, responses tell only what was computed. So
every entry is believed for a time that depends on who told it, and a wrong entry costs a recomputation, never a wrong
answer: the instance's own index decides about reuse. Keys are 64-bit hashes chained over blocks, so that the tree
keeps 8 bytes a block instead of its tokens; two prompts that collide would share their hints.

Knows no load and no policy. Not in here: eviction by the instances, which they tell by `remove_keys`.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from poolweave.errors import ConfigError
from poolweave.index.identity import Identity
from poolweave.scheduler._native import CandidateTable, NativePromptTree, PromptTreeStats, block_keys, tokens_of_list
from poolweave.scheduler.slots import SlotArray, Slots
from poolweave.types import Int32Array, TokenIds, UInt64Array, as_tokens

Scores: TypeAlias = Int32Array  # [slots.capacity] leading blocks that each instance holds

_MIN_BYTES = 64 * 1024
_SWEEP_NODES = 512  # about 20 us
_NO_LIMIT = 2**32 - 1


class Source(enum.Enum):
    """Who told that an instance holds a prefix."""

    __hash__ = object.__hash__  # enum's own runs Python code at each look-up

    ROUTE = "route"  # inferred here: the prompt was sent to it and queues there
    RESPONSE = "response"  # inferred here: it answered this prompt, so it computed the KV
    EVENT = "event"  # the instance said so itself


class PromptTree:
    """Prefix -> instances, for hundreds of instances and millions of (instance, block) entries.

    `ttl_s` is how long an entry is believed after it was last told, one figure or one a source (math.inf: until it
    is taken back). `max_bytes` is a hard cap: the least recently used prefixes go first. `slots` is shared when
    several trees serve one scheduler. Thread-safe as far as calls on one tree are atomic.
    """

    def __init__(
        self,
        block_tokens: int = 16,
        ttl_s: float | Mapping[Source, float] = 300.0,
        *,
        max_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        slots: Slots | None = None,
    ) -> None:
        if block_tokens < 1:
            raise ConfigError(
                f"block_tokens must be at least 1, got {block_tokens}", setting="block_tokens", value=block_tokens
            )
        if max_bytes is not None and max_bytes < _MIN_BYTES:
            raise ConfigError(
                f"max_bytes of a prompt tree must be at least {_MIN_BYTES}, got {max_bytes}",
                setting="max_bytes",
                value=max_bytes,
                limit=_MIN_BYTES,
            )
        self.block_tokens = block_tokens
        self.slots = Slots() if slots is None else slots
        self._ttl_s = _ttls(ttl_s)
        self._clock = clock
        self._native = NativePromptTree(max_bytes)

    def namespace(self, identity: Identity) -> int:
        """The number under which prefixes of this identity are kept, in any tree; 0 is the default."""
        return self.namespace_of(identity.digest)

    def namespace_of(self, digest: bytes) -> int:
        """The namespace of an identity's digest: the start of its keys' chain. Nothing is kept, however many there
        are."""
        return int.from_bytes(digest[:8], "little")

    def keys(self, tokens: TokenIds, ns: int = 0, *, parent: int | None = None) -> UInt64Array:
        """One chained key a whole block of `tokens`, which follow block `parent` or start a prompt of `ns`.

        Cost about 10 ns a block, 5 ns a token more for a list.
        """
        array: Int32Array | None = None
        if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.flags.c_contiguous:
            array = tokens if tokens.ndim == 1 else None
        elif type(tokens) is list:
            array = tokens_of_list(tokens)
        seed = ns if parent is None else parent
        return block_keys(as_tokens(tokens) if array is None else array, self.block_tokens, seed)

    def insert(self, tokens: TokenIds, instance: str, ns: int = 0, *, source: Source = Source.RESPONSE) -> int:
        """`instance` holds the whole blocks of `tokens`. Returns the tokens now entered, fewer only under the cap."""
        return self.insert_keys(self.keys(tokens, ns), instance, source=source) * self.block_tokens

    def insert_keys(
        self, keys: UInt64Array, instance: str, *, parent: int | None = None, source: Source = Source.EVENT
    ) -> int:
        """`instance` holds these blocks, which follow block `parent` or start a prompt. Returns the blocks entered.

        0 when the instance is not known to hold `parent`: an event was lost; `stats().orphans` counts it.
        """
        return self.insert_slot(keys, self.slots.add(instance), source, parent)

    def insert_slot(self, keys: UInt64Array, slot: int, source: Source, parent: int | None = None) -> int:
        """`insert_keys` for the instance on `slot`, which is one of `slots`."""
        now = self._clock()
        return self._native.insert(keys, slot, now + self._ttl_s[source], now, parent)

    def match(self, tokens: TokenIds, ns: int = 0) -> dict[str, int]:
        """Leading tokens of `tokens` that each instance holds, without those that hold none."""
        scores = self.scores(self.keys(tokens, ns))
        held = np.flatnonzero(scores)
        names = self.slots.names
        lengths = (scores[held] * self.block_tokens).tolist()
        return {name: n for slot, n in zip(held.tolist(), lengths, strict=True) if (name := names[slot]) is not None}

    def scores(self, keys: UInt64Array) -> Scores:
        """Leading blocks that each slot holds; cost O(blocks / 8 + holders on the path)."""
        scores = np.empty(self.slots.capacity, np.int32)
        self._native.match(keys, self._clock(), scores)
        return scores

    def held_tokens(self, keys: UInt64Array, slots: SlotArray) -> Int32Array:
        """Leading tokens that each of `slots` holds, [len(slots)]; cost as `scores`."""
        held = np.empty(len(slots), np.int32)
        self._native.match_at(keys, self._clock(), slots, held, self.block_tokens)
        return held

    def score(self, keys: UInt64Array, table: CandidateTable) -> None:
        """Add the leading tokens that each candidate holds to `table`; cost as `scores`."""
        table.score(self._native, keys, self._clock(), self.block_tokens)

    def remove(self, tokens: TokenIds, instance: str, ns: int = 0, *, keep_tokens: int = 0) -> int:
        """`instance` holds at most the first `keep_tokens` of `tokens` now, and nothing that continues the rest.

        Returns the (instance, block) entries given up.
        """
        keys = self.keys(tokens, ns)
        keep = -(-keep_tokens // self.block_tokens)
        return self.remove_keys(keys[keep : keep + 1], instance)

    def remove_keys(self, keys: UInt64Array, instance: str) -> int:
        """`instance` gave these blocks up, and with each what continues it. Returns the entries given up."""
        slot = self.slots.get(instance)
        return 0 if slot is None else self._native.remove(keys, slot, self._clock())

    def limit(self, instance: str, max_blocks: int | None) -> None:
        """`instance` has room for so many blocks: what it used longest ago is no longer believed once as many others
        were entered. None: no limit is known."""
        self._native.limit(self.slots.add(instance), _NO_LIMIT if max_blocks is None else min(max_blocks, _NO_LIMIT))

    def forget(self, instance: str) -> None:
        """Forget all that `instance` holds, but not its slot. O(1); memory follows in later sweeps."""
        slot = self.slots.get(instance)
        if slot is not None:
            self._native.retire(slot)

    def drop(self, instance: str) -> None:
        """Forget a dead instance and free its slot, in one call. Not for trees that share their slots."""
        self.forget(instance)
        self.slots.remove(instance)

    def entries(self, instance: str) -> int:
        """Blocks entered for `instance`, those included that expired and were not swept yet."""
        slot = self.slots.get(instance)
        return 0 if slot is None else self._native.entries(slot)

    def sweep(self) -> None:
        """Free what expired and what dead instances held. Insertions do a part of this each; call it when idle."""
        left = self._native.stats().nodes + 1
        while left > 0:
            left -= self._native.sweep(self._clock(), min(left, _SWEEP_NODES))

    def stats(self) -> PromptTreeStats:
        """Frozen counters: blocks, entries, nodes, nbytes, evicted, expired, orphans."""
        return self._native.stats()

    def check(self) -> None:
        """Assert all invariants; walks the whole tree."""
        self._native.check()


def block_keys_of(tokens: Int32Array, block_tokens: int, seed: int = 0) -> UInt64Array:
    """The chained keys that a tree of this block size uses in the namespace with this seed; 0: the default's."""
    return block_keys(tokens, block_tokens, seed)


def _ttls(ttl_s: float | Mapping[Source, float]) -> dict[Source, float]:
    ttls = dict(ttl_s) if isinstance(ttl_s, Mapping) else dict.fromkeys(Source, ttl_s)
    for source in Source:
        value = ttls.get(source)
        if value is None or math.isnan(value) or value <= 0:
            raise ConfigError(
                f"ttl_s must be positive for source {source.value!r}, got {value}", setting="ttl_s", value=value
            )
    return ttls
