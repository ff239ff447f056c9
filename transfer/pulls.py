"""Pulling the blocks of one offer into their places: slice by slice, lease and checksums looked at."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field

import numpy as np

from poolweave.errors import PeerLost, PoolweaveError, TransferFailed
from poolweave.transfer import messages
from poolweave.transfer._native import Abort, Outcome
from poolweave.transfer.link import Link
from poolweave.transfer.messages import encode
from poolweave.transfer.resharding import Route, Shard
from poolweave.transfer.store import Placement, ShortWay
from poolweave.transfer.transport import Home, PullSlice, Source
from poolweave.types import UInt64Array

SLICE_BYTES = 256 << 20  # a longer pull reports its progress after each; at 64 MiB copies by two threads lost a tenth


@dataclass(slots=True, eq=False)
class Session:
    """One peer's connection, as long as it lasts. Used on the loop's thread; `jobs` also by pull workers."""

    peer: str
    link: Link
    source: Source
    shard: Shard  # what the peer's memory holds of the model
    route: Route | None  # what of it is ours too; None: we have no use for its blocks
    num_parts: int  # peers whose shards make up one arrival here
    short_way: ShortWay | None = None  # for its small offers
    jobs: dict[int, Job] = field(default_factory=dict)
    lost: bool = False

    @property
    def is_whole(self) -> bool:
        """The peer's blocks are just what ours are."""
        return self.num_parts == 1 and self.route is not None and self.route.is_whole

    def tell(self, answer: messages.Answer) -> None:
        """Best effort: a sender that is gone knows by the same loss."""
        with contextlib.suppress(TransferFailed):
            self.link.send(encode(answer))


@dataclass(slots=True, eq=False)
class Job:
    """One offer being pulled."""

    session: Session
    offer: messages.Offer
    deadline: float
    abort: Abort
    placement: Placement | None = None
    num_fresh: int = 0  # blocks that are pulled
    nbytes: int = 0
    calls: int = 0
    pull_s: float = 0.0

    @property
    def owner(self) -> tuple[Session, int]:
        return self.session, self.offer.offer

    @property
    def num_handed(self) -> int:
        """Of them, blocks that lie where the sender has them."""
        return self.placement.handed if self.placement is not None else 0


def pull(home: Home, job: Job) -> None:
    """Move the blocks that the placement lacks into place and check them; a long pull tells its progress.

    Those that were handed over are there already: their lease is looked at, their checksums are not.

    Runs on any thread. Raises TransferFailed, PeerLost; then nothing of the placement is valid.
    """
    began = time.perf_counter()
    placement, offer = job.placement, job.offer
    if placement is None or not len(placement.fresh):
        return
    held, count, handed = len(placement.held), len(placement.fresh), placement.handed
    hashes = np.empty(count, np.uint64) if offer.checksums else None
    step = max(1, SLICE_BYTES // home.memory.layout.block_bytes)
    if handed:
        require_lent(job.session, offer, job.abort)
    for first in range(handed, count, step):
        end = min(count, first + step)
        target = home.memory.extents(placement.tiers[first:end], placement.slots[first:end])
        part = PullSlice(
            offer=offer,
            first=held + first,
            target=target,
            hashes=hashes[first:end] if hashes is not None else None,
            abort=job.abort,
            timeout_s=job.deadline - time.monotonic(),
        )
        pull_slice(job.session, part)
        job.calls += target.num_coalesced
        if end < count:
            job.session.tell(messages.Progress(offer.offer, held + end, offer.num_blocks))
    if hashes is not None:
        wanted = np.frombuffer(offer.checksums, np.uint64)[held + handed :]
        verify(job.session.peer, held + handed, hashes[handed:], wanted)
    job.pull_s = time.perf_counter() - began


def pull_slice(session: Session, part: PullSlice) -> None:
    """Move one slice. Raises TransferFailed, PeerLost; then nothing of it is valid."""
    peer, where = session.peer, f"blocks {part.first} to {part.first + part.target.num_blocks - 1}"
    try:
        outcome = Outcome.ABORTED if part.abort.is_set else session.source.pull(part)
    except PoolweaveError as error:
        if part.abort.is_set:
            outcome = Outcome.ABORTED
        else:
            raise TransferFailed(
                f"pulling {where} from {peer} failed: {error}", peer=peer, part=where, reason="pull"
            ) from error
    if outcome != Outcome.DONE:
        raise _stopped(session, where, outcome)


def require_lent(session: Session, offer: messages.Offer, abort: Abort) -> None:
    """Of blocks that lie where the sender has them. Raises TransferFailed, PeerLost when they are not valid."""
    if abort.is_set:
        raise _stopped(session, "blocks that were handed over", Outcome.ABORTED)
    if not session.source.lends(offer):
        raise _stopped(session, "blocks that were handed over", Outcome.REVOKED)


def _stopped(session: Session, where: str, outcome: Outcome) -> PoolweaveError:
    peer = session.peer
    if session.lost:
        return PeerLost(f"{peer} was lost while {where} were pulled", peer=peer, part=where, reason="lost")
    reason = "its lease ended" if outcome == Outcome.REVOKED else "it was cancelled"
    return TransferFailed(f"pulling {where} from {peer} stopped: {reason}", peer=peer, part=where, reason="lease")


def verify(peer: str, first_block: int, got: UInt64Array, wanted: UInt64Array) -> None:
    """Raises TransferFailed naming the first block whose checksum differs; `got[0]` is that of `first_block`."""
    if got.tobytes() != wanted.tobytes():
        wrong = np.flatnonzero(got != wanted)
        first = int(wrong[0]) + first_block
        raise TransferFailed(
            f"{len(wrong)} of {len(got)} blocks from {peer} have wrong checksums, first block {first}",
            peer=peer,
            part=f"block {first}",
            reason="checksum",
        )
