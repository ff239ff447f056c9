"""An arrival that is put together: of the stretches of growing offers, and of the offers of several shards.

    feed: one sender's offer into it     coverage: what was told     pulled: what is here
Pure state; its Assembler holds the lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from poolweave.errors import DuplicateTransfer, PoolweaveError, TransferFailed
from poolweave.transfer import messages
from poolweave.transfer._native import Abort
from poolweave.transfer.growth import Coverage, Stretch
from poolweave.transfer.pulls import Session
from poolweave.transfer.store import Placement
from poolweave.types import UInt64Array


@dataclass(slots=True, eq=False)
class Feed:
    """One offer on its way into an assembly. `busy`: a thread pulls for it."""

    session: Session
    offer: messages.Offer
    assembly: Assembly
    deadline: float
    coverage: Coverage
    pulled: Coverage
    queue: deque[messages.Ready] = field(default_factory=deque)
    busy: bool = False
    nbytes: int = 0
    calls: int = 0
    early_nbytes: int = 0  # pulled before the last stretch was told
    pull_s: float = 0.0

    def told(self, ready: messages.Ready) -> None:
        """Raises ConfigError for a stretch that does not fit what was told before."""
        self.coverage.add(stretch_of(ready))
        if self.coverage.complete:
            self.early_nbytes = self.nbytes
        self.queue.append(ready)

    def layers_here(self, num_blocks: int) -> int:
        """Leading layers of our shard, of the first blocks, for which this feed has brought its part."""
        reached = self.pulled.reached(num_blocks)
        route = self.session.route
        assert route is not None
        if reached == route.source_layers.stop:
            return len(route.target.layers)
        return route.source.layers.start + reached - route.target.layers.start


@dataclass(slots=True, eq=False)
class Assembly:
    """`num_parts` feeds fill one placement. `over` once it was committed or given up; it knows no feeds any more then.

    `deadline` is when it is given up: a lease after the last word of any part.
    """

    owner: tuple[Session, int]
    offer: messages.Offer  # the first one; the others say the same
    num_parts: int
    placement: Placement | None
    deadline: float
    feeds: list[Feed] = field(default_factory=list)
    abort: Abort | None = field(default_factory=Abort)  # it holds a descriptor, so it goes when all is over
    error: PoolweaveError | None = None
    over: bool = False

    def require_part(self, session: Session, offer: messages.Offer) -> None:
        """Raises DuplicateTransfer for a second offer of one shard, TransferFailed for one of something else."""
        if self.over:
            raise TransferFailed(f"the other parts of {offer.tag!r} failed: {self.error}", reason="parts")
        if any(feed.session.shard.seat == session.shard.seat for feed in self.feeds):
            raise DuplicateTransfer(f"a transfer {offer.tag!r} of that shard is being pulled", tag=offer.tag)
        first = self.offer
        same = (first.num_blocks, first.num_tokens, first.tokens, first.identity, first.tenant, first.insert) == (
            offer.num_blocks, offer.num_tokens, offer.tokens, offer.identity, offer.tenant, offer.insert,
        )  # fmt: skip
        if not same or self.num_parts != session.num_parts:
            raise TransferFailed(
                f"the parts of {offer.tag!r} differ: {first.num_blocks} blocks of {first.num_tokens} tokens at first, "
                f"{offer.num_blocks} of {offer.num_tokens} from {session.peer}",
                peer=session.peer, reason="parts",
            )  # fmt: skip

    @property
    def is_whole(self) -> bool:
        """All of all parts is here."""
        return len(self.feeds) == self.num_parts and all(feed.pulled.complete for feed in self.feeds)

    @property
    def is_busy(self) -> bool:
        return any(feed.busy for feed in self.feeds)

    @property
    def blocks(self) -> UInt64Array:
        """Where it goes: matched blocks, then those being filled."""
        if self.placement is None:
            return np.empty(0, np.uint64)
        return np.concatenate([self.placement.held, self.placement.fresh])

    @property
    def num_held(self) -> int:
        return len(self.placement.held) if self.placement is not None else 0

    @property
    def num_fresh(self) -> int:
        return len(self.placement.fresh) if self.placement is not None else 0

    @property
    def num_handed(self) -> int:
        return self.placement.handed if self.placement is not None else 0

    def layers_here(self, num_blocks: int) -> int:
        """Leading layers that the first `num_blocks` blocks have, all parts together."""
        if self.over:
            route = self.owner[0].route
            return len(route.target.layers) if route is not None and self.error is None else 0
        if len(self.feeds) < self.num_parts:
            return 0
        return min(feed.layers_here(num_blocks) for feed in self.feeds)


def stretch_of(ready: messages.Ready) -> Stretch:
    return Stretch(ready.first_block, ready.end_block, ready.first_layer, ready.end_layer)
