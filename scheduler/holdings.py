"""What each instance holds, as far as a scheduler knows: one prompt tree a role, fed by routes, responses and events.

Source: MemServe §6 (prefill-only, decode-only and colocated trees). Knows no load and no policy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from poolweave.scheduler._native import CandidateTable, PromptTreeStats
from poolweave.scheduler.fleet import Fleet
from poolweave.scheduler.kv_events import RemovedBlocks, StoredBlocks, TreeFeed
from poolweave.scheduler.prompt_tree import PromptTree, Source
from poolweave.scheduler.routes import SchedulerConfig
from poolweave.scheduler.slots import SlotArray
from poolweave.types import Int32Array, Role, TokenIds, UInt64Array

_ROUTE_TTL_S = 60.0  # a prompt that was sent and not answered by then is no longer expected there


class Holdings:
    """Prompt trees by role and the event feeds of instances. One thread owns it."""

    def __init__(self, fleet: Fleet, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._degraded_credit = config.degraded_credit
        ttl_s = {
            Source.ROUTE: min(config.tree_ttl_s, _ROUTE_TTL_S),
            Source.RESPONSE: config.tree_ttl_s,
            Source.EVENT: config.event_ttl_s,
        }
        self._trees = {
            role: PromptTree(
                config.block_tokens,
                ttl_s,
                max_bytes=config.tree_max_bytes,
                clock=clock,
                slots=fleet.slots,
            )
            for role in Role
        }
        self._feeds: dict[str, TreeFeed] = {}
        self._degraded: set[str] = set()

    def keys(self, tokens: TokenIds, ns: int = 0) -> UInt64Array:
        """Block keys as all the trees use them."""
        return self._trees[Role.PREFILL].keys(tokens, ns)

    def namespace_of(self, digest: bytes) -> int:
        """The namespace of an identity's digest, the same in all the trees."""
        return next(iter({tree.namespace_of(digest) for tree in self._trees.values()}))

    def held_tokens(self, keys: UInt64Array, slots: SlotArray, roles: tuple[Role, ...]) -> Int32Array:
        """Leading tokens that each of `slots`, all of these roles, is believed to hold, in whole blocks."""
        trees = self._trees
        found = [trees[role].held_tokens(keys, slots) for role in roles if len(self._fleet.of(role))]
        held: Int32Array = found[0] if len(found) == 1 else np.sum(found, axis=0, dtype=np.int32)
        if self._degraded:
            size = trees[roles[0]].block_tokens
            held = (held // size * self._fleet.credit[slots]).astype(np.int32) * size
        return held

    def score(self, keys: UInt64Array, table: CandidateTable, roles: tuple[Role, ...]) -> None:
        """Enter the leading tokens that each candidate, all of these roles, is believed to hold."""
        for role in roles:
            if len(self._fleet.of(role)):
                self._trees[role].score(keys, table)
        if self._degraded:
            table.believe(self._fleet.credit, self._trees[roles[0]].block_tokens)

    def insert(self, keys: UInt64Array, slot: int, source: Source) -> None:
        """The instance on `slot` holds these blocks, from a prompt's start on."""
        self._trees[self._fleet.role(slot)].insert_slot(keys, slot, source)

    def learned(self, name: str, keys: UInt64Array, source: Source = Source.EVENT) -> None:
        """`name` said that it holds this prompt: after a replication, or in its inventory. Raises UnknownPeer."""
        self.insert(keys, self._fleet.slots.slot(name), source)

    def limit(self, name: str, cache_tokens: int | None) -> None:
        """`name` has room for so many tokens of historical KV; None: not known. Raises UnknownPeer."""
        tree = self._trees[self._fleet.role(self._fleet.slots.slot(name))]
        tree.limit(name, None if cache_tokens is None else cache_tokens // tree.block_tokens)

    def taken_back(self, name: str, keys: UInt64Array) -> int:
        """`name` said that it gave these blocks up, by our own keys. Returns the entries. Raises UnknownPeer."""
        return self._trees[self._fleet.role(self._fleet.slots.slot(name))].remove_keys(keys, name)

    def forget(self, name: str) -> None:
        """A dead instance holds nothing. O(1)."""
        for tree in self._trees.values():
            tree.forget(name)
        self._feeds.pop(name, None)
        self._degraded.discard(name)

    def stored(self, name: str, event: StoredBlocks, ns: int = 0) -> int:
        """A KV event: blocks came. Returns those entered. Raises UnknownPeer, ConfigError for other block sizes."""
        entered = self._feed(name).stored(event, ns)
        self._judge(name)
        return entered

    def removed(self, name: str, event: RemovedBlocks) -> int:
        """A KV event: blocks went. Returns the entries given up. Raises UnknownPeer."""
        return self._feed(name).removed(event)

    def cleared(self, name: str) -> None:
        """The instance holds nothing, or is about to tell everything again. Raises UnknownPeer."""
        self._feed(name).cleared()
        self._judge(name)

    def lost_events(self, name: str) -> None:
        """Events of this instance were lost: it is credited with less until `cleared`. Raises UnknownPeer."""
        self._feed(name).lost()
        self._judge(name)

    def regained_events(self, name: str) -> None:
        """What was lost was told again. Raises UnknownPeer."""
        self._feed(name).regained()
        self._judge(name)

    def believes(self, name: str) -> bool:
        """False while it is credited with less than the trees hold of it."""
        return name not in self._degraded

    def stats(self) -> dict[Role, PromptTreeStats]:
        """Counters of each tree."""
        return {role: tree.stats() for role, tree in self._trees.items()}

    def sweep(self) -> None:
        """Free what expired or died; insertions do a part of it each. Call it when idle."""
        for tree in self._trees.values():
            tree.sweep()

    def check(self) -> None:
        """Assert all invariants."""
        for tree in self._trees.values():
            tree.check()

    def _feed(self, name: str) -> TreeFeed:
        tree = self._trees[self._fleet.role(self._fleet.slots.slot(name))]
        feed = self._feeds.get(name)
        if feed is None:
            feed = self._feeds[name] = TreeFeed(tree, name)
        return feed

    def _judge(self, name: str) -> None:
        degraded = self._feeds[name].degraded
        self._fleet.credit[self._fleet.slots.slot(name)] = self._degraded_credit if degraded else 1.0
        (self._degraded.add if degraded else self._degraded.discard)(name)
