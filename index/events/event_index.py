"""The index that KV events feed: which sources hold which prefixes, exactly. Knows no sockets.

A source is whatever publishes KV events: an instance of this package, a vLLM or SGLang engine (one a data-parallel
rank). Blocks of different sources are compared by their tokens, never by the publishers' hashes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from poolweave.errors import ConfigError
from poolweave.index._native import EventIndexStats, NativeEventIndex, NativeEventStream, kv_event_scope
from poolweave.index.events.feed import EventFeed, FeedState
from poolweave.index.events.wire import encode_extra_keys
from poolweave.types import Tier, TokenIds, as_tokens

_MAX_BLOCKS = 1 << 24
_MEDIUM_BITS = {Tier.HBM: 1, Tier.DRAM: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStatus:
    """A source's figures. Only `LIVE` and `PARTIAL` sources are credited."""

    state: FeedState
    num_blocks: int
    next_sequence: int
    batches: int
    gaps: int
    repeats: int
    restarts: int
    malformed: int


class EventIndex:
    """Mutable; matches from several threads run in parallel with one thread that feeds it."""

    def __init__(self, block_tokens: int = 16) -> None:
        self._native = NativeEventIndex(block_tokens)
        self._lock = threading.Lock()
        self._slots: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._feeds: dict[str, EventFeed] = {}

    @property
    def block_tokens(self) -> int:
        return self._native.block_tokens

    def add_source(
        self,
        name: str,
        *,
        can_replay: bool = True,
        counts_copies: bool = False,
        credited: Tier = Tier.HBM | Tier.DRAM,
        max_blocks: int = _MAX_BLOCKS,
    ) -> EventFeed:
        """Begin to credit `name`; the feed takes its batches.

        `counts_copies`: the source publishes one store and one removal a copy, as vLLM does with
        kv_cache_report_mode unset; otherwise one removal ends all copies of a medium. Blocks in tiers that are not
        `credited` do not count. Raises ConfigError when the name is taken.
        """
        bits = sum(bit for tier, bit in _MEDIUM_BITS.items() if tier in credited)
        with self._lock:
            if name in self._slots:
                raise ConfigError(f"an event source named {name!r} exists; drop it first", setting="name", value=name)
            slot = self._native.add_source(counts_copies, max_blocks, bits)
            self._slots[name] = slot
            self._names[slot] = name
            feed = self._feeds[name] = EventFeed(NativeEventStream(self._native, slot), can_replay=can_replay)
        return feed

    def drop_source(self, name: str) -> None:
        """Forget a source that is gone and all that it held; harmless when there is none of this name."""
        with self._lock:
            slot = self._slots.pop(name, None)
            if slot is None:
                return
            del self._names[slot], self._feeds[name]
            self._native.drop_source(slot)

    def match(
        self,
        tokens: TokenIds,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Sequence[Any] | None] = (),
    ) -> dict[str, int]:
        """Leading tokens of `tokens` that each source holds, without those that hold none.

        `lora_name` and `cache_salt` as the source's events give them; `extra_keys` one entry a block as in vLLM's
        events (multimodal items, vLLM's salt), without the adapter's name. Cost O(blocks).
        """
        scores = self._native.match(
            as_tokens(tokens), kv_event_scope(lora_name, cache_salt), encode_extra_keys(extra_keys)
        )
        names, block_tokens = self._names, self._native.block_tokens
        return {
            name: blocks * block_tokens
            for slot, blocks in enumerate(scores.tolist())
            if blocks and (name := names.get(slot)) is not None
        }

    def status(self) -> dict[str, SourceStatus]:
        """Every source's state and figures."""
        with self._lock:
            return {
                name: SourceStatus(
                    state=feed.state,
                    num_blocks=self._native.num_held(self._slots[name]),
                    next_sequence=feed.next_sequence,
                    batches=feed.batches,
                    gaps=feed.gaps,
                    repeats=feed.repeats,
                    restarts=feed.restarts,
                    malformed=feed.malformed,
                )
                for name, feed in self._feeds.items()
            }

    def stats(self) -> EventIndexStats:
        return self._native.stats()

    def check(self) -> None:
        """Assert every invariant. Cost O(index)."""
        fault = self._native.check()
        assert not fault, fault
