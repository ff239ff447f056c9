"""The receiving half of an engine: greets who connects, and gives what they say to who deals with it.

Whole offers go to the Fetcher, growing ones to the Assembler, what arrived to the Deliveries. Source: MemServe §4.4.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping

from poolweave.errors import (
    InstanceClosed,
    LayoutMismatch,
    PoolweaveError,
    ProtocolError,
    StaleEpoch,
    UnknownPeer,
)
from poolweave.transfer import messages
from poolweave.transfer.assembler import Assembler, AssemblyHooks
from poolweave.transfer.assembly import Assembly
from poolweave.transfer.deliveries import Deliveries, taken_back
from poolweave.transfer.door import Door
from poolweave.transfer.fetcher import Fetcher
from poolweave.transfer.keys import session_keys
from poolweave.transfer.link import Link
from poolweave.transfer.loop import Loop
from poolweave.transfer.messages import REQUESTS, decode, describe, encode
from poolweave.transfer.pulls import Session
from poolweave.transfer.reservations import ReservationBook
from poolweave.transfer.resharding import routes_into
from poolweave.transfer.shipment import Arrival, no_blocks
from poolweave.transfer.stats import ReceiverStats
from poolweave.transfer.store import BlockStore, Payer
from poolweave.transfer.transport import Home, Transport
from poolweave.types import Tier

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
        self._deliveries = Deliveries(store, loop)
        self._arrivals = self._deliveries.arrivals
        self._reservations = ReservationBook(store)
        self._fetcher = Fetcher(home, store, self._reservations, self._deliveries, workers)
        hooks = AssemblyHooks(
            place=self._fetcher.place, finish=self._finish_assembly, release=self._release_assembly,
            submit=self._fetcher.submit, count_failure=self._deliveries.count_failure,
        )  # fmt: skip
        self.assembler = Assembler(home, self._arrivals, hooks, loop.wake_by)
        self._sessions: set[Session] = set()
        self._closed = False

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
        self._fetcher.close()
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
            **self._deliveries.counts,
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
        if session.is_whole and (mapped := source.mapped) is not None:
            session.short_way = self._store.short_way(self._home.memory.tiers, mapped)
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
        if self._fetcher.take_message(session, payload):
            return
        request = decode(REQUESTS, payload)
        if isinstance(request, messages.Offer):
            if request.growing or not session.is_whole:
                self.assembler.take(session, request)
            else:
                self._fetcher.take(session, request)
        elif isinstance(request, messages.Ready):
            self.assembler.take_ready(session, request)
        elif isinstance(request, messages.Cancel):
            if not self.assembler.cancel(session, request.offer, taken_back(session.peer)):
                self._fetcher.cancel(session, request)
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
        session.lost, session.short_way = True, None
        for job in list(session.jobs.values()):
            job.abort.set()
        self.assembler.lose(session)
        session.source.close()
        self._reservations.drop_all(session)

    def _take_reserve(self, session: Session, request: messages.Reserve) -> None:
        try:
            deadline = time.monotonic() + request.lease_s
            payer = Payer(request.identity, request.tenant)
            number = self._reservations.add(session, request.num_blocks, Tier(request.tier), deadline, payer)
        except (PoolweaveError, ValueError) as error:
            problem = error if isinstance(error, PoolweaveError) else ProtocolError(f"unknown tier {request.tier}")
            session.tell(messages.Failed(request.request, *describe(problem)))
            return
        self._wake_by(deadline)
        session.tell(messages.Reserved(request.request, number))

    # --- hooks of the assembler ----------------------------------------------------------------------------------

    def _finish_assembly(self, assembly: Assembly) -> bool:
        offer = assembly.offer
        blocks = self._store.commit(assembly.placement) if assembly.placement is not None else no_blocks()
        self._arrivals.extend(offer.tag, assembly.owner, assembly.deadline)
        if not self._deliveries.deliver(assembly, blocks, lambda: assembly.error is not None):
            return False
        self._deliveries.count_done(sum(feed.nbytes for feed in assembly.feeds), assembly.num_handed)
        return True

    def _release_assembly(self, assembly: Assembly) -> None:
        if len(assembly.blocks):
            self._store.release(assembly.blocks)
