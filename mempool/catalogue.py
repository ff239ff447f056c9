"""Catalogue: the index and the table in step. What is matched is pinned, what is indexed is sealed. Knows no bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from poolweave.errors import ConfigError
from poolweave.index import Identity, Inserted, MissReason, Namespace
from poolweave.mempool.quotas import NOBODY
from poolweave.mempool.space import BlockSpace
from poolweave.transfer import Incoming, Placement
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
        self.default_ns = self.namespace(default)

    def namespace(self, identity: Identity) -> Namespace:
        ns = self._space.index.namespace(identity)
        self._enter(ns)
        return ns

    def tenant(self, ns: int | None) -> int:
        """Whose quota pays for blocks of this namespace, as long as the caller has it. Raises ConfigError."""
        book = self._space.tenants
        return NOBODY if book is None else book.tenant(self._known(ns))

    def namespace_of(self, digest: bytes, tenant: bytes = b"") -> Namespace:
        """The namespace of an identity that another instance names, and whose it says that it is."""
        ns = self._space.index.namespace_of(digest, tenant)
        if tenant:
            self._enter(ns)
        return ns

    def tenant_digest(self, ns: int | None) -> bytes:
        """What names its tenant on the wire; b"" where nobody told it. Raises ConfigError as `digest`."""
        return self._space.index.tenant(self.default_ns if ns is None else ns)

    def digest(self, ns: int | None) -> bytes:
        """What names the namespace on the wire. Raises ConfigError for one that namespace() did not give."""
        digest = self._space.index.digest(self.default_ns if ns is None else ns)
        if digest is None:
            raise ConfigError(
                "namespace 0 stands for no identity; get one from namespace(identity)", setting="ns", value=0
            )
        return digest

    def match(self, tokens: Int32Array, ns: int | None) -> Found:
        space = self._space
        ns = self._known(ns)
        with space.lock:
            match = space.catalogue.match(tokens, ns)
        return Found(match.blocks, match.num_tokens, match.miss_reason)

    def insert(self, tokens: Int32Array, handles: UInt64Array, ns: int | None) -> Indexed:
        """Index the whole blocks of `tokens` that `handles` has. Raises NotSealed, UnknownBlock, StaleHandle, and
        ConfigError for a block given twice or indexed under another prefix; then nothing changed.
        """
        space = self._space
        ns = self._known(ns)
        with space.lock:
            inserted = space.catalogue.insert(tokens, handles, ns)
            if space.recorder is not None:
                self._record(tokens, handles, inserted, ns)
        return Indexed(inserted.num_tokens, inserted.duplicates, inserted.surplus)

    def place(self, incoming: Incoming) -> Placement | UInt64Array:
        """Match, pin and allocate what comes in.

        Only the matched blocks, pinned, when room must be made for the others, or they were reserved, or may lie where
        the sender has them.
        """
        if incoming.tokens is None and incoming.lent is not None:  # nothing to match
            return np.empty(0, np.uint64)
        space = self._space
        ns = self.namespace_of(incoming.identity, incoming.tenant)
        mask = incoming.on_demand._value_ if incoming.on_demand is not None and incoming.lent is None else 0
        tenant = NOBODY if space.tenants is None else space.tenants.tenant(ns)
        count = incoming.num_blocks
        blocks, tiers, slots = np.empty(count, np.uint64), np.empty(count, np.uint8), np.empty(count, np.int32)
        with space.lock:
            held, enough = space.catalogue.place(incoming.tokens, ns, mask, tenant, blocks, tiers, slots)
        if not enough:
            return blocks[:held]
        return Placement(incoming, blocks[:held], blocks[held:], tiers[: count - held], slots[: count - held])

    def commit(self, placement: Placement) -> None:
        """What was placed is there: seal full blocks, index them if asked."""
        space, incoming, held, fresh = self._space, placement.incoming, placement.held, placement.fresh
        whole = min(incoming.num_tokens // space.layout.block_tokens, incoming.num_blocks)
        tokens = incoming.tokens if incoming.insert else None
        ns = self.namespace_of(incoming.identity, incoming.tenant)  # it may have been given up meanwhile
        with space.lock:
            inserted = space.catalogue.commit(held, fresh, whole, tokens, ns, incoming.private)
            if space.recorder is not None and tokens is not None:
                self._record(tokens, np.concatenate((held, fresh)), inserted, ns)
        if space.on_sealed is not None and whole > len(held):
            space.on_sealed(fresh[: whole - len(held)])

    def delete(self, tokens: Int32Array, ns: int | None) -> tuple[int, int]:
        """Un-index what only this prompt needs. -> blocks given up, and how many of them became free"""
        space = self._space
        with space.lock:
            given = space.index.delete(tokens, self.default_ns if ns is None else ns)
            return len(given), space.drop(given, "deleted")

    def _enter(self, ns: Namespace) -> None:
        """Onto the account of its tenant."""
        if self._space.tenants is not None:
            self._space.tenants.enter(ns, self._space.index.tenant(ns))

    def _known(self, ns: int | None) -> int:
        """Raises ConfigError for a namespace that was not given out."""
        if ns is None:
            return self.default_ns
        self._space.index.require(ns)
        return ns

    def _record(self, tokens: Int32Array, handles: UInt64Array, inserted: Inserted, ns: int) -> None:
        """Tell others what the index took. Under the lock."""
        space = self._space
        assert space.recorder is not None
        new = handles[len(inserted.duplicates) : inserted.num_tokens // space.layout.block_tokens]
        tiers = [Tier(value) for value in space.locate(new)[0].tolist()]
        space.recorder.stored(tokens[: inserted.num_tokens], new, tiers, space.index.digest(ns))
