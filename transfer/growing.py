"""The sender's side of growing offers: checks what its owner calls ready, and tells the peer, in order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from poolweave.errors import ConfigError, NotSealed, TransferFailed
from poolweave.transfer._native import Window
from poolweave.transfer.checksums import ChecksumCache
from poolweave.transfer.growth import Coverage, Stretch
from poolweave.transfer.messages import MAX_STEPS, Ready
from poolweave.transfer.offers import Growth, OpenOffer, Step
from poolweave.transfer.peers import Peer
from poolweave.transfer.store import BlockStore, Loan
from poolweave.transfer.transport import Home
from poolweave.types import UInt64Array

STRETCH_BYTES = 64 << 20  # of sealed blocks: each is told, pulled and reported apart
TellPeer = Callable[[OpenOffer, Ready], bool]


class Grower:
    """Thread-safe. `tell_peer` publishes a step and sends its Ready; False when the offer or the connection is gone.

    `checksums` is None where they are off.
    """

    def __init__(self, home: Home, store: BlockStore, checksums: ChecksumCache | None, tell_peer: TellPeer) -> None:
        self._home = home
        self._store = store
        self._checksums = checksums
        self._tell_peer = tell_peer

    def begin(self, num_blocks: int) -> Growth:
        """Of an offer nothing of which is ready."""
        return Growth(Coverage(num_blocks, range(self._home.memory.layout.num_layers)))

    def begin_whole(self, num_blocks: int) -> Growth:
        """Of an offer of sealed blocks that do not go as they are: the peer holds another shard, or their checksums are
        still to be made. A large one goes in several stretches: each is pulled while the next one is hashed.
        """
        growth, layout = self.begin(num_blocks), self._home.memory.layout
        step = max(1, STRETCH_BYTES // layout.block_bytes)
        for first in range(0, num_blocks, step):
            self._extend(growth, layout.num_layers, min(first + step, num_blocks))
        return growth

    def ready(self, offer: OpenOffer, num_layers: int | None, num_blocks: int | None) -> None:
        """The first layers of the first blocks are sealed (None: all); what was said before is not said again.

        Raises ConfigError for an offer that does not grow and for more than there is, NotSealed.
        """
        growth, layout, blocks = offer.growth, self._home.memory.layout, offer.loan.blocks
        if growth is None or not offer.shipment.growing:
            raise ConfigError("this transfer was made of sealed blocks; give it growing=True", setting="growing")
        layers = layout.num_layers if num_layers is None else num_layers
        count = len(blocks) if num_blocks is None else num_blocks
        for name, value, limit in (("layers", layers, layout.num_layers), ("num_blocks", count, len(blocks))):
            if not 0 <= value <= limit:
                raise ConfigError(f"{name}={value} lies outside [0, {limit}]", setting=name, value=value, limit=limit)
        with growth.lock:
            self._require_sealed(blocks[:count], layers)
            self._extend(growth, layers, count)
        self.tell(offer)

    def tell(self, offer: OpenOffer) -> None:
        """Send what is ready and was not sent; nothing while the offer waits for its turn."""
        growth = offer.growth
        if growth is None:
            return
        with growth.lock:
            while growth.num_told < len(growth.sealed) and offer.number > 0:
                if not self._tell_one(offer, growth, growth.sealed[growth.num_told]):
                    return
                growth.num_told += 1

    def _require_sealed(self, blocks: UInt64Array, layers: int) -> None:
        sealed = self._store.sealed_layers(blocks)
        if len(sealed) and sealed.min() < layers:
            first = int(np.argmax(sealed < layers))
            raise NotSealed(
                f"block {first} of this transfer has {sealed[first]} sealed layers, {layers} were called ready; seal() "
                "them first",
                handle=int(blocks[first]),
            )

    def _extend(self, growth: Growth, layers: int, num_blocks: int) -> None:
        for stretch in growth.coverage.missing(layers, 0, num_blocks):
            growth.coverage.add(stretch)
            growth.sealed.append(stretch)

    def _tell_one(self, offer: OpenOffer, growth: Growth, stretch: Stretch) -> bool:
        peer = offer.route
        assert isinstance(peer, Peer)
        part = peer.route.within(stretch.layers) if peer.route is not None else None
        if peer.route is None or part is None:
            return True  # the peer needs nothing of it
        windows = () if peer.route.is_whole and part == peer.route else (part.windows[0],)
        if len(growth.steps) == MAX_STEPS:
            raise TransferFailed(f"a growing transfer has at most {MAX_STEPS} steps; make them larger", reason="steps")
        sums = self._sums(offer, stretch, windows)
        growth.steps.append(Step(stretch, windows))
        ready = Ready(
            offer.number, len(growth.steps), stretch.first_block, stretch.end_block, part.source_layers.start,
            part.source_layers.stop, sums,
        )  # fmt: skip
        if self._tell_peer(offer, ready):
            return True
        growth.steps.pop()
        return False

    def _sums(self, offer: OpenOffer, stretch: Stretch, windows: tuple[Window, ...]) -> bytes:
        if self._checksums is None:
            return b""
        rows = slice(stretch.first_block, stretch.end_block)
        loan = Loan(offer.loan.blocks[rows], offer.loan.tiers[rows], offer.loan.slots[rows])
        if not windows:
            whole = offer.shipment.num_tokens // self._home.memory.layout.block_tokens
            return self._checksums.of_loan(loan, max(0, whole - stretch.first_block)).tobytes()
        hashes = np.empty(len(loan.blocks), np.uint64)
        extents = self._home.memory.extents(loan.tiers, loan.slots, windows)
        self._home.memory.hash_blocks(extents, self._home.limits.copy_threads, hashes)
        return hashes.tobytes()
