"""ShortWay: small offers of one peer taken into a pool by one native call, where nobody else needs to hear of them.

It does all or nothing. Whatever it does not take in goes the long way (PoolStore.place, a pull, PoolStore.commit),
where it is also found out what is wrong with it.
"""

from __future__ import annotations

from poolweave.mempool._native import Intake
from poolweave.mempool.allocator import Allocator
from poolweave.mempool.catalogue import Catalogue
from poolweave.mempool.space import BlockSpace
from poolweave.transfer import MappedPeer, Offer, TakenIn, Tiers

_MOST_BYTES = 256 << 10  # the pool's lock is held while they are copied: 50 us
_HOLDS_GIL = 64 << 10


class ShortWay:
    """Thread-safe."""

    def __init__(
        self, space: BlockSpace, catalogue: Catalogue, allocator: Allocator, ours: Tiers, peer: MappedPeer
    ) -> None:  # fmt: skip
        self._space = space
        self._catalogue = catalogue
        self._allocator = allocator
        self._block_bytes = space.layout.block_bytes
        self._block_tokens = space.layout.block_tokens
        self._peer = peer  # keeps the mapping
        self._intake = Intake(space.catalogue, ours, peer.tiers, peer.words)
        self._identity, self._ns = b"", catalogue.default_ns  # of the offer before: most are of one
        self._most_blocks = _MOST_BYTES // self._block_bytes
        self._most_held = _HOLDS_GIL // self._block_bytes

    @staticmethod
    def serves(space: BlockSpace) -> bool:
        """False for pools with quotas, KV events, write-through or guests: these are told step by step."""
        return space.tenants is None and space.recorder is None and space.on_sealed is None and space.guests is None

    def take(self, offer: Offer) -> TakenIn | None:
        """None when it was not taken in; then nothing is left of it."""
        count = offer.num_blocks
        nbytes = count * self._block_bytes
        if not (count and offer.insert and nbytes <= _MOST_BYTES) or offer.private or offer.reservation:
            return None
        if offer.tokens is None:
            return None
        ns = self._catalogue.namespace_of(offer.identity, offer.tenant)
        self._identity, self._ns = offer.identity, ns
        with self._space.lock:
            done, available, held, calls, blocks = self._intake.take(
                offer.tokens, ns, min(count, offer.num_tokens // self._block_tokens), offer.on_demand, offer.offer,
                offer.tiers, offer.slots, offer.checksums, bool(offer.tag), nbytes > _HOLDS_GIL,
            )  # fmt: skip
        if available:
            self._allocator.released(available)
        return TakenIn(blocks, count - held, calls, offer.offer) if done else None

    def take_message(self, message: bytes) -> TakenIn | None:
        """As take() of an offer without a tag, read out of its message here; None for any other message too."""
        ns, identity = self._ns, self._identity
        with self._space.lock:
            taken = self._intake.take_message(
                message, identity, ns, self._block_tokens, self._most_blocks, self._most_held
            )
        if taken is None:
            return None
        done, available, num_pulled, calls, number = taken
        if available:
            self._allocator.released(available)
        return TakenIn(None, num_pulled, calls, number) if done else None
