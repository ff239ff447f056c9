"""The receiving half of an engine: places what is offered, pulls it, checks it, and hands it to who asks.

    Offer -> announce tag -> place (match, pin, allocate) -> pull -> check lease, sums -> commit -> settle -> Confirm
Whatever fails in between releases the placement and answers Failed. Source: MemServe §4.4.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from poolweave.errors import (
    InstanceClosed,
    LayoutMismatch,
    PoolweaveError,
    ProtocolError,
    StaleEpoch,
    TransferFailed,
    UnknownPeer,
)
from poolweave.transfer import messages
from poolweave.transfer._native import Abort
from poolweave.transfer.arrivals import ArrivalBook
from poolweave.transfer.assembler import Assembler, AssemblyHooks
from poolweave.transfer.assembly import Assembly
from poolweave.transfer.door import Door
from poolweave.transfer.keys import session_keys
from poolweave.transfer.link import Link
from poolweave.transfer.loop import Loop
from poolweave.transfer.messages import REQUESTS, decode, describe, encode
from poolweave.transfer.pulls import Job, Session, pull
from poolweave.transfer.reservations import ReservationBook
from poolweave.transfer.resharding import routes_into
from poolweave.transfer.shipment import Arrival, no_blocks
from poolweave.transfer.stats import ReceiverStats
from poolweave.transfer.store import BlockStore, Incoming, Placement
from poolweave.transfer.transport import Home, Transport
from poolweave.types import Tier, UInt64Array

_INLINE_BYTES = 1 << 20  # a pull up to this size runs on the loop's thread: a hop to another costs more
_log = logging.getLogger(__name__)


class Receiver:
    """Its greet(), tick() and session handlers run on the loop's thread; claim() and stats() on any."""

    def __init__(
        self, home: Home, store: BlockStore, transports: Mapping[str, Transport], workers: int,
        loop: Loop,
    ) -> None:  # fmt: skip
        self._home = home
        self._store = store
        self._transports = transports
        self._loop = loop
        self._wake_by = loop.wake_by
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix=f"poolweave-pull-{home.instance}")
        self._arrivals = ArrivalBook()
        self._reservations = ReservationBook(store)
        hooks = AssemblyHooks(
            place=self._placement, finish=self._finish_assembly, release=self._release_assembly, submit=self._submit,
            count_failure=self._count_failure,
        )  # fmt: skip
        self.assembler = Assembler(home, self._arrivals, hooks, loop.wake_by)
        self._sessions: set[Session] = set()
        self._never = Abort()
        self._closed = False
        self._counts = dict.fromkeys(("done", "failed", "bytes"), 0)
        self._counting = threading.Lock()

    def claim(self, tag: bytes, timeout: float | None) -> Arrival:
        return self._arrivals.claim(tag, timeout)

    def discard(self, tag: bytes, until: float) -> None:
        self._arrivals.discard(tag, until)

    def greet(self, door: Door, link: Link, greeting: messages.Greeting, fds: list[int]) -> None:
        """Take a new connection over. Raises what it is to be refused with; then `fds` are closed."""
        try:
            if greeting.peer != self._home.instance:
                raise UnknownPeer(f"this is {self._home.instance}, not {greeting.peer}", peer=greeting.peer)
            taken, fds = fds, []
            if isinstance(greeting, messages.DataHello):
                fds = taken
                self._greet_data(door, link, greeting)
            else:
                self._greet_control(door, link, greeting, taken)
        finally:
            for fd in fds:
                os.close(fd)

    def tick(self, now: float) -> float:
        self._arrivals.expire(now)
        self._reservations.expire(now)
        growing = self.assembler.tick(now)
        return min(growing, self._arrivals.next_deadline(), self._reservations.next_deadline())

    def close(self) -> None:
        """Abort what is being pulled, drop what nobody claimed. Idempotent; not on the loop's thread."""
        self._closed = True
        for session in list(self._sessions):
            for job in list(session.jobs.values()):
                job.abort.set()
        self.assembler.close()
        self._workers.shutdown(wait=True)
        self._arrivals.close()
        self._reservations.close()

    def hang_up_all(self) -> None:
        for session in self._sessions:
            session.link.close()
            session.source.close()
        self._sessions.clear()
        self._reservations.close()  # also what was asked for between close() and the loop's end

    def stats(self) -> ReceiverStats:
        return ReceiverStats(
            sessions=len(self._sessions),
            pulling=sum(len(session.jobs) for session in list(self._sessions)) + self.assembler.num_open,
            unclaimed=self._arrivals.num_unclaimed,
            reserved=self._reservations.num_blocks,
            expired=self._arrivals.num_expired,
            **self._counts,
        )

    def check(self) -> None:
        """Asserts all invariants."""
        self._arrivals.check()
        self._reservations.check()

    # --- greetings ---------------------------------------------------------------------------------------------

    def _greet_control(self, door: Door, link: Link, hello: messages.Hello, fds: list[int]) -> None:
        shard = self._home.shard
        ours = shard.cut.layout.fingerprint()
        try:
            if self._closed:
                raise InstanceClosed(f"{self._home.instance} is closing")
            if hello.scheme != door.address.scheme:
                raise ProtocolError(f"{hello.instance} speaks {hello.scheme} at the door of {door.address}")
            if hello.fingerprint != ours:
                raise LayoutMismatch(
                    f"{hello.instance} stores {hello.fingerprint}, {self._home.instance} stores {ours}; use one layout",
                    ours=ours,
                    theirs=hello.fingerprint,
                )
            theirs = shard.seated(hello.seat)
            routes = routes_into(theirs.cut, shard)
            taken, fds = fds, []
            source = self._transports[hello.scheme].attach(hello, taken, theirs.layout)
        finally:
            for fd in fds:
                os.close(fd)
        nonce = secrets.token_bytes(16)
        route = next((route for route in routes if route.source == theirs), None)
        session = Session(hello.instance, link, source, theirs, route, len(routes))
        link.send(encode(messages.Welcome(self._home.instance, self._home.epoch, nonce, shard.seat)))
        secret = self._home.limits.secret
        key, mine = session_keys(secret, hello.nonce, nonce) if secret is not None else (None, None)
        link.rekey(mine, key)
        link.owner = session
        link.hand_over(self._on_frame, self._on_lost)
        self._sessions.add(session)

    def _greet_data(self, door: Door, link: Link, hello: messages.DataHello) -> None:
        if hello.peer_epoch != self._home.epoch:
            raise StaleEpoch(f"{self._home.instance} has restarted since its offer", peer=self._home.instance)
        link.send(encode(messages.Welcome(self._home.instance, self._home.epoch, secrets.token_bytes(16))))
        self._transports[door.address.scheme].adopt(link.detach())

    # --- sessions: on the loop's thread ------------------------------------------------------------------------

    def _on_frame(self, link: Link, payload: bytes, _: list[int]) -> None:
        session = link.owner
        assert isinstance(session, Session)
        request = decode(REQUESTS, payload)
        if isinstance(request, messages.Offer):
            if request.growing or not session.is_whole:
                self.assembler.take(session, request)
            else:
                self._take_offer(session, request)
        elif isinstance(request, messages.Ready):
            self.assembler.take_ready(session, request)
        elif isinstance(request, messages.Cancel):
            self._take_cancel(session, request)
        elif isinstance(request, messages.Reserve):
            self._take_reserve(session, request)
        else:
            self._reservations.drop(session, request.reservation)

    def _on_lost(self, link: Link, error: PoolweaveError) -> None:
        session = link.owner
        assert isinstance(session, Session)
        if isinstance(error, ProtocolError):
            _log.warning("dropped the connection of %s: %s", session.peer, error)
        self._sessions.discard(session)
        session.lost = True
        for job in list(session.jobs.values()):
            job.abort.set()
        self.assembler.lose(session)
        session.source.close()
        self._reservations.drop_all(session)

    def _take_offer(self, session: Session, offer: messages.Offer) -> None:
        job = Job(session, offer, time.monotonic() + offer.lease_s, self._never)
        try:
            if offer.tag:
                self._arrivals.announce(offer.tag, job.owner, job.deadline)
            job.placement = self._placement(session, offer)
            job.nbytes = job.num_fresh * self._home.memory.layout.block_bytes
        except PoolweaveError as error:
            self._fail(job, error)
            return
        except Exception as error:  # noqa: BLE001  # the request's boundary: it fails alone
            self._fail_unexpectedly(job, error)
            return
        if job.nbytes == 0 or (session.source.is_instant and job.nbytes <= _INLINE_BYTES):
            self._run(job)
            return
        job.abort = Abort()
        session.jobs[offer.offer] = job
        try:
            self._workers.submit(self._run, job)
        except RuntimeError:  # shut down meanwhile
            job.abort.set()
            self._run(job)

    def _placement(self, session: Session, offer: messages.Offer) -> Placement | None:
        if offer.num_blocks == 0:
            return None
        reserved = self._reservations.blocks(session, offer.reservation) if offer.reservation else None
        incoming = Incoming(
            num_blocks=offer.num_blocks,
            num_tokens=offer.num_tokens,
            identity=offer.identity,
            tokens=np.frombuffer(offer.tokens, np.int32) if offer.tokens is not None else None,
            insert=offer.insert,
            private=offer.private,
            on_demand=Tier(offer.on_demand) if offer.on_demand else None,
            reserved=reserved,
        )
        placement = self._store.place(incoming)
        if offer.reservation:
            self._reservations.use(session, offer.reservation, len(placement.fresh))
        return placement

    def _take_cancel(self, session: Session, cancel: messages.Cancel) -> None:
        if self.assembler.cancel(session, cancel.offer, _taken_back(session.peer)):
            return
        job = session.jobs.get(cancel.offer)
        if job is not None:
            job.abort.set()  # it may have settled just now
        if cancel.tag:
            owner = session, cancel.offer
            self._arrivals.withdraw(cancel.tag, owner, _taken_back(session.peer), only_here=job is not None)

    def _take_reserve(self, session: Session, request: messages.Reserve) -> None:
        try:
            deadline = time.monotonic() + request.lease_s
            number = self._reservations.add(session, request.num_blocks, Tier(request.tier), deadline)
        except (PoolweaveError, ValueError) as error:
            problem = error if isinstance(error, PoolweaveError) else ProtocolError(f"unknown tier {request.tier}")
            session.tell(messages.Failed(request.request, *describe(problem)))
            return
        self._wake_by(deadline)
        session.tell(messages.Reserved(request.request, number))

    # --- pulls: on the loop's thread or a worker's ---------------------------------------------------------------

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
        pulled = job.num_fresh
        settled = not offer.tag or self._settle(job, blocks, lambda: job.abort.is_set)
        session.jobs.pop(offer.offer, None)
        if not settled:
            error = _taken_back(session.peer)
            self._arrivals.fail(offer.tag, job.owner, error)
            self._answer_failure(job, error)
            return
        if not offer.tag and len(blocks):
            self._store.release(blocks)  # nobody will ask for them: the index has its own references
        with self._counting:
            self._counts["done"] += 1
            self._counts["bytes"] += job.nbytes
        session.tell(messages.Confirm(offer.offer, pulled, job.nbytes, job.calls, 0, job.pull_s))

    def _settle(self, job: Job | Assembly, blocks: UInt64Array, taken_back: Callable[[], bool]) -> bool:
        """Hand the blocks to who asks for the tag. False when it was withdrawn: then they are released."""
        offer = job.offer
        tokens = np.frombuffer(offer.tokens, np.int32) if offer.tokens is not None else None
        arrival = Arrival(
            job.owner[0].peer, offer.tag, blocks, offer.num_tokens, tokens, job.num_fresh,
            self._store.release, self._release_later,
        )  # fmt: skip
        if self._arrivals.settle(offer.tag, job.owner, arrival, taken_back):
            self._wake_by(job.deadline)
            return True
        arrival.close()
        return False

    def _release_later(self, blocks: UInt64Array) -> None:
        self._loop.call_soon(functools.partial(self._store.release, blocks))

    # --- hooks of the assembler ----------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], None]) -> bool:
        try:
            self._workers.submit(work)
        except RuntimeError:  # shut down meanwhile
            return False
        return True

    def _finish_assembly(self, assembly: Assembly) -> bool:
        offer = assembly.offer
        blocks = self._store.commit(assembly.placement) if assembly.placement is not None else no_blocks()
        self._arrivals.extend(offer.tag, assembly.owner, assembly.deadline)
        if offer.tag and not self._settle(assembly, blocks, lambda: assembly.error is not None):
            return False
        if not offer.tag and len(blocks):
            self._store.release(blocks)
        with self._counting:
            self._counts["done"] += 1
            self._counts["bytes"] += sum(feed.nbytes for feed in assembly.feeds)
        return True

    def _release_assembly(self, assembly: Assembly) -> None:
        if len(assembly.blocks):
            self._store.release(assembly.blocks)

    def _count_failure(self) -> None:
        with self._counting:
            self._counts["failed"] += 1

    # --- the end of a pull that failed ---------------------------------------------------------------------------

    def _fail(self, job: Job, error: PoolweaveError) -> None:
        job.session.jobs.pop(job.offer.offer, None)
        if job.placement is not None:
            held = np.concatenate([job.placement.held, job.placement.fresh])
            if len(held):
                self._store.release(held)
        if job.offer.tag:
            self._arrivals.fail(job.offer.tag, job.owner, error)
            self._wake_by(job.deadline)
        self._answer_failure(job, error)

    def _fail_unexpectedly(self, job: Job, error: Exception) -> None:
        _log.exception("an offer of %s failed", job.session.peer)
        self._fail(job, TransferFailed(f"internal error at the receiver: {error!r}", reason="internal"))

    def _answer_failure(self, job: Job, error: PoolweaveError) -> None:
        said = str(error)  # a log may keep what it is given, and the error's frames hold descriptors
        _log.warning("a transfer of %d blocks from %s failed: %s", job.offer.num_blocks, job.session.peer, said)
        self._count_failure()
        job.session.tell(messages.Failed(job.offer.offer, *describe(error)))


def _taken_back(peer: str) -> TransferFailed:
    return TransferFailed(f"{peer} took the transfer back", peer=peer, reason="cancelled")
