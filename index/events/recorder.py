"""What an index takes and gives up, as KV events: names every block, and knows where it said that it lies.

Payloads must be unique, as block handles are: one that is given up is named by the key under which it was stored.
Identities appear in events as a salt that is their digest, never their fields.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from poolweave.index.events.publisher import KVEventPublisher
from poolweave.index.events.wire import MEDIA, BlockRemoved, BlockStored, Event
from poolweave.index.keys import NO_PARENT, block_keys, short_keys
from poolweave.types import Int32Array, Tier, UInt64Array


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive blocks that were stored together."""

    tokens: Int32Array  # of these blocks only
    hashes: list[int]
    parent: int | None
    salt: str | None


class EventRecorder:
    """`publisher` stays the caller's to close. Thread-safe; a lock of the caller's keeps calls in the order of changes.

    `default` is the digest of the identity that listeners take for granted: its blocks carry no salt.
    """

    def __init__(self, publisher: KVEventPublisher, default: bytes | None = None) -> None:
        self.publisher = publisher
        self._default = default
        self._block_tokens = publisher.block_tokens
        self._lock = threading.Lock()
        self._places: dict[int, tuple[_Run, int]] = {}  # payload -> its run, and which block of it
        self._media: dict[int, str] = {}  # payload -> where it lies

    def stored(
        self, tokens: Int32Array, payloads: UInt64Array, tiers: Sequence[Tier], digest: bytes | None = None
    ) -> None:  # fmt: skip
        """The last blocks of `tokens`, all of which is indexed, are new: `payloads`, one a block, each in its tier.

        `digest` is that of the identity whose prefix it is; None for the namespace of callers who name none.
        """
        count = len(payloads)
        if not count:
            return
        hashes = short_keys(block_keys(tokens, self._block_tokens, parent=digest or NO_PARENT)).tolist()
        first = len(hashes) - count
        salt = None if digest is None or digest == self._default else digest.hex()
        own = tokens[first * self._block_tokens : len(hashes) * self._block_tokens]
        run = _Run(own, hashes[first:], hashes[first - 1] if first else None, salt)
        with self._lock:
            given = payloads.tolist()
            self._places.update(zip(given, zip(itertools.repeat(run), range(count)), strict=False))
            self._media.update(zip(given, (MEDIA[tier] for tier in tiers), strict=True))
            self._publish(self._stores(given))

    def removed(self, payloads: UInt64Array) -> None:
        """The index gave these up."""
        with self._lock:
            by_medium: dict[str, list[int]] = {}
            for payload in payloads.tolist():
                run, place = self._places.pop(payload)
                by_medium.setdefault(self._media.pop(payload), []).append(run.hashes[place])
            self._publish([BlockRemoved(block_hashes=hashes, medium=medium) for medium, hashes in by_medium.items()])

    def moved(self, payloads: UInt64Array, tier: Tier) -> None:
        """Those of these that are indexed lie in `tier` now."""
        with self._lock:
            here = [p for p in payloads.tolist() if self._media.get(p, MEDIA[tier]) != MEDIA[tier]]
            left: dict[str, list[int]] = {}
            for payload in here:
                run, place = self._places[payload]
                left.setdefault(self._media[payload], []).append(run.hashes[place])
                self._media[payload] = MEDIA[tier]
            gone = [BlockRemoved(block_hashes=hashes, medium=medium) for medium, hashes in left.items()]
            self._publish([*self._stores(here), *gone])  # held throughout

    def __len__(self) -> int:
        """Blocks told and not taken back."""
        return len(self._places)

    def _stores(self, payloads: Iterable[int]) -> list[Event]:
        """Runs as long as they can be; a parent comes before its children."""
        places = sorted((id(self._places[p][0]), self._places[p][1], p) for p in payloads)
        events: list[Event] = []
        for _, group in itertools.groupby(enumerate(places), self._belongs):
            chosen = [place for _, place in group]
            run, first = self._places[chosen[0][2]]
            end = first + len(chosen)
            events.append(
                BlockStored(
                    block_hashes=run.hashes[first:end],
                    parent_block_hash=run.hashes[first - 1] if first else run.parent,
                    token_ids=run.tokens[first * self._block_tokens : end * self._block_tokens].tolist(),
                    block_size=self._block_tokens,
                    lora_id=None,
                    lora_name=None,
                    medium=self._media[chosen[0][2]],
                    cache_salt=run.salt,
                )
            )
        return events

    def _belongs(self, placed: tuple[int, tuple[int, int, int]]) -> tuple[int, int, str]:
        """What is equal for blocks that follow one another in one run and one medium."""
        index, (run, place, payload) = placed
        return run, place - index, self._media[payload]

    def _publish(self, events: Sequence[Event]) -> None:
        if events:
            self.publisher.publish(events)
