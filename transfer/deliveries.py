"""Deliveries: what arrived and was checked goes to who asks for its tag, or to the index alone; and is counted."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import numpy as np

from poolweave.errors import PoolweaveError, TransferFailed
from poolweave.transfer.arrivals import ArrivalBook
from poolweave.transfer.assembly import Assembly
from poolweave.transfer.loop import Loop
from poolweave.transfer.pulls import Job
from poolweave.transfer.shipment import Arrival
from poolweave.transfer.store import BlockStore
from poolweave.types import UInt64Array


class Deliveries:
    """Thread-safe. `counts`: transfers done and failed, bytes moved, blocks handed over."""

    def __init__(self, store: BlockStore, loop: Loop) -> None:
        self.arrivals = ArrivalBook()
        self.counts = dict.fromkeys(("done", "failed", "bytes", "handed"), 0)
        self._store = store
        self._loop = loop
        self._counting = threading.Lock()

    def deliver(self, job: Job | Assembly, blocks: UInt64Array, taken_back: Callable[[], bool]) -> bool:
        """Hand the blocks to who asks for the tag; without one only the index keeps them. False when it was withdrawn.

        The references that the caller had are gone in any case.
        """
        if job.offer.tag:
            return self._settle(job, blocks, taken_back)
        if len(blocks):
            self._store.release(blocks)  # nobody will ask for them: the index has its own references
        return True

    def fail(self, job: Job | Assembly, error: PoolweaveError) -> None:
        """Whoever asks for the tag hears of it."""
        if job.offer.tag:
            self.arrivals.fail(job.offer.tag, job.owner, error)
            self._loop.wake_by(job.deadline)

    def count_done(self, nbytes: int, handed: int) -> None:
        with self._counting:
            self.counts["done"] += 1
            self.counts["bytes"] += nbytes
            self.counts["handed"] += handed

    def count_failure(self) -> None:
        with self._counting:
            self.counts["failed"] += 1

    def _settle(self, job: Job | Assembly, blocks: UInt64Array, taken_back: Callable[[], bool]) -> bool:
        offer = job.offer
        tokens = np.frombuffer(offer.tokens, np.int32) if offer.tokens is not None else None
        arrival = Arrival(
            job.owner[0].peer, offer.tag, blocks, offer.num_tokens, tokens, job.num_fresh,
            self._store.release, self._release_later,
        )  # fmt: skip
        if self.arrivals.settle(offer.tag, job.owner, arrival, taken_back):
            self._loop.wake_by(job.deadline)
            return True
        arrival.close()
        return False

    def _release_later(self, blocks: UInt64Array) -> None:
        self._loop.call_soon(functools.partial(self._store.release, blocks))


def taken_back(peer: str) -> TransferFailed:
    return TransferFailed(f"{peer} took the transfer back", peer=peer, reason="cancelled")
