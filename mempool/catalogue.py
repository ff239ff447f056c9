"""Catalogue: the index and the table in step. What is matched is pinned, what is indexed is sealed. Knows no bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from poolweave.errors import ConfigError
from poolweave.index import Identity, MissReason
from poolweave.mempool.quotas import NOBODY
from poolweave.mempool.space import BlockSpace
from poolweave.types import Int32Array, Tier, UInt64Array


@dataclass(frozen=True, slots=True)
class Found:
    """Blocks of the longest indexed prefix, one reference each for the caller."""

    handles: UInt64Array
    num_tokens: int
    miss_reason: MissReason


@dataclass(frozen=True, slots=True)
class Indexed:
    """`num_tokens` of the prompt are indexed now. `duplicates` are the first given blocks, not taken because their
    places were indexed already; `surplus` are those of them that differ from what the index has there.
    """

    num_tokens: int
    duplicates: UInt64Array
    surplus: UInt64Array


class Catalogue:
    """Namespaces are small ints; None is that of `default`. Thread-safe."""

    def __init__(self, space: BlockSpace, default: Identity) -> None:
        self._space = space
        self._digests: dict[int, bytes] = {}
        self.default_ns = self.namespace(default)

    def namespace(self, identity: Identity) -> int:
        ns = self._space.index.namespace(identity)
        self._digests[ns] = identity.digest
        if self._space.tenants is not None:
            self._space.tenants.enter(ns, identity)
        return ns

    def tenant(self, ns: int | None) -> int:
        """Whose quota pays for blocks of this namespace."""
        book = self._space.tenants
        return NOBODY if book is None else book.tenant(self.default_ns if ns is None else ns)

    def namespace_of(self, digest: bytes) -> int:
        """The namespace of an identity that another instance names."""
        ns = self._space.index.namespace_of(digest)
        self._digests.setdefault(ns, digest)
        return ns

    def digest(self, ns: int | None) -> bytes:
        """What names the namespace on the wire. Raises ConfigError for one that namespace() did not give."""
        ns = self.default_ns if ns is None else ns
        if ns not in self._digests:
            raise ConfigError(
                f"namespace {ns} is not known here; get it from namespace(identity)", setting="ns", value=ns
            )
        return self._digests[ns]

    def match(self, tokens: Int32Array, ns: int | None) -> Found:
        space = self._space
        with space.lock:
            match = space.index.match(tokens, self.default_ns if ns is None else ns)
            space.table.retain(match.blocks)
        return Found(match.blocks, match.num_tokens, match.miss_reason)

    def insert(self, tokens: Int32Array, handles: UInt64Array, ns: int | None) -> Indexed:
        """Index the whole blocks of `tokens` that `handles` has. Raises NotSealed, UnknownBlock, StaleHandle, and
        ConfigError for a block given twice or indexed under another prefix; then nothing changed.
        """
        space = self._space
        ns = self.default_ns if ns is None else ns
        block_tokens = space.layout.block_tokens
        whole = min(len(tokens) // block_tokens, len(handles))
        tokens, handles = tokens[: whole * block_tokens], handles[:whole]
        with space.lock:
            if space.table.check_insertable(handles):
                self._require_in_place(tokens, handles, ns)
            inserted = space.index.insert(tokens, handles, ns)
            # below a block that is new there is nothing old: duplicates are a leading run
            new = handles[len(inserted.duplicates) : inserted.num_tokens // block_tokens]
            space.table.index(new)
            if space.recorder is not None:
                tiers = [Tier(value) for value in space.locate(new)[0].tolist()]
                space.recorder.stored(tokens[: inserted.num_tokens], new, tiers, self._digests.get(ns))
        return Indexed(inserted.num_tokens, inserted.duplicates, inserted.surplus)

    def delete(self, tokens: Int32Array, ns: int | None) -> tuple[int, int]:
        """Un-index what only this prompt needs. -> blocks given up, and how many of them became free"""
        space = self._space
        with space.lock:
            given = space.index.delete(tokens, self.default_ns if ns is None else ns)
            return len(given), space.drop(given, "deleted")

    def _require_in_place(self, tokens: Int32Array, handles: UInt64Array, ns: int) -> None:
        """Each block that is indexed already must be so at this very place: it can be in one place only."""
        space = self._space
        there = space.index.match(tokens, ns, touch=False).blocks
        flags = np.empty(len(handles), np.uint8)
        space.table.flags(handles, flags)
        indexed = (flags & space.table.INDEXED).astype(bool)
        in_place = np.zeros(len(handles), bool)
        in_place[: len(there)] = handles[: len(there)] == there
        if np.any(indexed & ~in_place):
            handle = int(handles[int(np.argmax(indexed & ~in_place))])
            raise ConfigError(
                f"block {handle} is indexed under another prefix already; copy it to a new block", setting="blocks"
            )
