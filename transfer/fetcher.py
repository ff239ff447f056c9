"""Fetcher: takes whole offers in, one by one: placed, pulled, checked, committed, delivered, confirmed.

    Offer -> announce tag -> place (match, pin, allocate) -> pull -> check lease, sums -> commit -> deliver -> Confirm
Whatever fails in between releases the placement and answers Failed. Growing ones are the Assembler's.
Source: MemServe §4.4.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from poolweave.errors import PoolweaveError, TransferFailed
from poolweave.transfer import messages
from poolweave.transfer._native import Abort
from poolweave.transfer.deliveries import Deliveries, taken_back
from poolweave.transfer.messages import describe
from poolweave.transfer.pulls import Job, Session, pull
from poolweave.transfer.reservations import ReservationBook
from poolweave.transfer.shipment import no_blocks
from poolweave.transfer.store import BlockStore, Incoming, Placement, TakenIn
from poolweave.transfer.transport import Home
from poolweave.types import Tier, UInt64Array

_INLINE_BYTES = 1 << 20  # a pull up to this size runs on the loop's thread: a hop to another costs more
_log = logging.getLogger(__name__)


class Fetcher:
    """take() and cancel() run on the loop's thread, longer pulls on workers of its own."""

    def __init__(
        self, home: Home, store: BlockStore, reservations: ReservationBook, deliveries: Deliveries, workers: int
    ) -> None:
        self._home = home
        self._store = store
        self._reservations = reservations
        self._deliveries = deliveries
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix=f"poolweave-pull-{home.instance}")
        self._never = Abort()

    def take(self, session: Session, offer: messages.Offer) -> None:
        """A new offer. What is wrong with it is answered, not raised."""
        job = Job(session, offer, time.monotonic() + offer.lease_s, self._never)
        try:
            if offer.tag:
                self._deliveries.arrivals.announce(offer.tag, job.owner, job.deadline)
            taken = self._take_shortly(job)
            if taken is None:
                job.placement = self.place(session, offer)
                job.num_fresh = len(job.placement.fresh) if job.placement is not None else 0
            job.nbytes = (job.num_fresh - job.num_handed) * self._home.memory.block_bytes
        except PoolweaveError as error:
            self._fail(job, error)
            return
        except Exception as error:  # noqa: BLE001  # the request's boundary: it fails alone
            self._fail_unexpectedly(job, error)
            return
        if taken is not None:
            self._succeed(job, taken.blocks if taken.blocks is not None else no_blocks())
            return
        if job.nbytes == 0 or (session.source.is_instant and job.nbytes <= _INLINE_BYTES):
            self._run(job)
            return
        job.abort = Abort()
        session.jobs[offer.offer] = job
        if not self.submit(functools.partial(self._run, job)):
            job.abort.set()
            self._run(job)

    def take_message(self, session: Session, message: bytes) -> bool:
        """Take in a small offer that nobody waits for right out of its message. False when it is anything else."""
        if session.short_way is None:
            return False
        began = time.perf_counter()
        taken = session.short_way.take_message(message)
        if taken is None:
            return False
        nbytes = taken.num_pulled * self._home.memory.block_bytes
        pull_s = time.perf_counter() - began
        session.tell(messages.Confirm(taken.number, taken.num_pulled, nbytes, taken.num_calls, 0, pull_s))
        self._deliveries.count_done(nbytes, 0)
        return True

    def cancel(self, session: Session, cancel: messages.Cancel) -> None:
        """The sender took an offer back: it is pulled no further, and an arrival that nobody claimed is dropped."""
        job = session.jobs.get(cancel.offer)
        if job is not None:
            job.abort.set()  # it may have settled just now
        if cancel.tag:
            owner = session, cancel.offer
            error = taken_back(session.peer)
            self._deliveries.arrivals.withdraw(cancel.tag, owner, error, only_here=job is not None)

    def submit(self, work: Callable[[], None]) -> bool:
        """Run it on a worker. False once shut down."""
        try:
            self._workers.submit(work)
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """Waits for the workers. Idempotent."""
        self._workers.shutdown(wait=True)

    def place(self, session: Session, offer: messages.Offer) -> Placement | None:
        """Where its blocks go; None where it has none. Raises what the store does."""
        if offer.num_blocks == 0:
            return None
        reserved = self._reservations.blocks(session, offer.reservation) if offer.reservation else None
        incoming = Incoming(
            num_blocks=offer.num_blocks,
            num_tokens=offer.num_tokens,
            identity=offer.identity,
            tenant=offer.tenant,
            tokens=np.frombuffer(offer.tokens, np.int32) if offer.tokens is not None else None,
            insert=offer.insert,
            private=offer.private,
            on_demand=Tier(offer.on_demand) if offer.on_demand else None,
            reserved=reserved,
            lent=session.source.lend(offer) if session.is_whole else None,
        )
        placement = self._store.place(incoming)
        if offer.reservation:
            self._reservations.use(session, offer.reservation, len(placement.fresh))
        return placement

    def _take_shortly(self, job: Job) -> TakenIn | None:
        """None when there is no short way for this offer, or it led nowhere: nothing has happened then."""
        if job.session.short_way is None:
            return None
        began = time.perf_counter()
        taken = job.session.short_way.take(job.offer)
        if taken is not None:
            job.pull_s = time.perf_counter() - began
            job.num_fresh, job.calls = taken.num_pulled, taken.num_calls
        return taken

    def _run(self, job: Job) -> None:
        try:
            pull(self._home, job)
            blocks = self._store.commit(job.placement) if job.placement is not None else no_blocks()
        except PoolweaveError as error:
            self._fail(job, error)
        except Exception as error:  # noqa: BLE001  # the request's boundary: it fails alone
            self._fail_unexpectedly(job, error)
        else:
            self._succeed(job, blocks)

    def _succeed(self, job: Job, blocks: UInt64Array) -> None:
        offer, session = job.offer, job.session
        delivered = self._deliveries.deliver(job, blocks, lambda: job.abort.is_set)
        session.jobs.pop(offer.offer, None)
        if not delivered:
            error = taken_back(session.peer)
            self._deliveries.fail(job, error)
            self._answer_failure(job, error)
            return
        self._deliveries.count_done(job.nbytes, job.num_handed)
        session.tell(messages.Confirm(offer.offer, job.num_fresh, job.nbytes, job.calls, 0, job.pull_s))

    def _fail(self, job: Job, error: PoolweaveError) -> None:
        job.session.jobs.pop(job.offer.offer, None)
        if job.placement is not None:
            held = np.concatenate([job.placement.held, job.placement.fresh])
            if len(held):
                self._store.release(held)
        self._deliveries.fail(job, error)
        self._answer_failure(job, error)

    def _fail_unexpectedly(self, job: Job, error: Exception) -> None:
        _log.exception("an offer of %s failed", job.session.peer)
        self._fail(job, TransferFailed(f"internal error at the receiver: {error!r}", reason="internal"))

    def _answer_failure(self, job: Job, error: PoolweaveError) -> None:
        said = str(error)  # a log may keep what it is given, and the error's frames hold descriptors
        _log.warning("a transfer of %d blocks from %s failed: %s", job.offer.num_blocks, job.session.peer, said)
        self._deliveries.count_failure()
        job.session.tell(messages.Failed(job.offer.offer, *describe(error)))
