"""The sending half of an engine: lends blocks, offers them, and takes them back however it ends.

Ending an offer goes in one order: lease word cleared, transport revoked, loan given back, Transfer told.
Source: MemServe §4.4.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from poolweave.errors import (
    InstanceClosed,
    PoolweaveError,
    TransferFailed,
    TransferTimeout,
    UnknownPeer,
)
from poolweave.transfer import messages
from poolweave.transfer.addresses import Address
from poolweave.transfer.checksums import ChecksumCache
from poolweave.transfer.growing import Grower
from poolweave.transfer.launcher import Launcher
from poolweave.transfer.link import Link
from poolweave.transfer.loop import Loop
from poolweave.transfer.messages import ANSWERS, decode, encode, revive
from poolweave.transfer.offers import OfferBook, OpenOffer
from poolweave.transfer.peers import Dialer, DialHooks, Peer, Presence
from poolweave.transfer.questions import QuestionBook, check_reservation
from poolweave.transfer.sender_settings import SenderSettings
from poolweave.transfer.shipment import Reservation, Shipment, Transfer
from poolweave.transfer.stats import SenderStats
from poolweave.transfer.store import BlockStore, Payer
from poolweave.transfer.transport import Home, Transport
from poolweave.types import Tier

_ASSIST_S = 5e-3  # a waiting thread reads answers itself for so long, and hears of an end that came otherwise so late

Launched = tuple[OpenOffer, "PoolweaveError | None"]  # with what it failed with


class Sender:
    """Thread-safe. Its hooks and tick() run on the loop's thread; the store is never called under its lock."""

    def __init__(
        self, home: Home, store: BlockStore, loop: Loop, transports: Mapping[str, Transport], settings: SenderSettings
    ) -> None:
        self._home = home
        self._store = store
        self._loop = loop
        self._transports = transports
        self._settings = settings
        checksums = ChecksumCache(home.memory, home.limits.copy_threads) if settings.checksums else None
        self._grower = Grower(home, store, checksums, self._tell_ready)
        hooks = DialHooks(self._hello, self._on_ready, self._on_frame, self._on_failed, self._on_lost)
        self._dialer = Dialer(loop, home.limits, home.shard, hooks)
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}
        self._book = OfferBook(settings.max_in_flight_bytes)
        self._launcher = Launcher(home, transports, settings, checksums, self._grower)
        self._questions = QuestionBook()
        self._closed = False
        self._counts = dict.fromkeys(("done", "failed", "expired", "cancelled", "bytes"), 0)

    def connect(self, name: str, addresses: Sequence[Address], requested: str) -> None:
        """Know `name` by these addresses; a change of address ends the old connection when it is idle or lost."""
        with self._lock:
            self._require_open()
            known = self._peers.get(name)
            if known is not None and known.addresses == tuple(addresses):
                return
            self._peers[name] = Peer(name, tuple(addresses), requested)
        if known is not None:
            self._forget(known, TransferFailed(f"{name} was given another address", peer=name, reason="reconnect"))

    def disconnect(self, name: str) -> None:
        """Forget `name`; what is on its way to it fails. Unknown names are ignored."""
        with self._lock:
            known = self._peers.pop(name, None)
        if known is not None:
            self._forget(known, TransferFailed(f"{name} was disconnected", peer=name, reason="disconnect"))

    def presence(self, name: str) -> Presence:
        """Dials when there is no connection; ask again then. Raises UnknownPeer."""
        peer = self._peer(name)
        with self._lock:
            seen = Presence(peer.epoch if peer.ready else 0, peer.failed_dials)
        if not seen.epoch:
            self._pump(peer)
        return seen

    def offer(self, name: str, shipment: Shipment, priority: int) -> Transfer:
        """Lend the blocks and offer them. Raises what lend() raises, UnknownPeer, DuplicateTransfer, StaleEpoch."""
        peer = self._peer(name)
        if shipment.dst is not None:
            check_reservation(peer, shipment.dst, len(shipment.blocks))
        loan = self._store.lend(shipment.blocks, unsealed=shipment.growing)
        try:
            with self._lock:
                at_once = self._book.has_room(peer.name, len(loan.blocks) * self._home.memory.block_bytes)
            offer = self._launcher.prepare(peer, shipment, loan, priority, at_once=at_once)
            offer.transfer._carried = self, offer
            launched = self._enter(peer, offer)
            if launched is None:
                self._launcher.hash_now(offer)
                launched = self._enter(peer, offer)
                assert launched is not None
        except BaseException:
            self._store.give_back(loan)
            raise
        self._loop.wake_by(offer.deadline)
        self._follow_up(peer, launched)
        return offer.transfer

    def _enter(self, peer: Peer, offer: OpenOffer) -> list[Launched] | None:
        """Queue the offer and send what may go. None, and nothing is queued, when others took the place of one that is
        hashed while it goes: on the loop's thread, to which its turn may fall, that would hold up everybody.
        """
        with self._lock:
            self._require_known(peer)
            if offer.is_hashed_late and not self._book.has_room(peer.name, offer.nbytes):
                return None
            self._book.add(offer)
            return self._send_waiting(peer)

    def cancel(self, offer: OpenOffer) -> bool:
        """End it as if it failed. False when it had ended before."""
        error = TransferFailed(f"transfer to {offer.peer} cancelled", peer=offer.peer, reason="cancelled")
        return self._finish(offer, error)

    def ready(self, offer: OpenOffer, layers: int | None, num_blocks: int | None) -> None:
        """More of a growing offer is sealed. Raises ConfigError, NotSealed."""
        self._grower.ready(offer, layers, num_blocks)

    def wait(self, offer: OpenOffer, longest_s: float) -> bool:
        """Wait for word of its peer on the calling thread. False when that is the loop's again."""
        peer = offer.route
        if longest_s <= 0 or not isinstance(peer, Peer):
            return False
        return peer.assist(min(self._settings.spin_s, longest_s), min(_ASSIST_S, longest_s), offer.transfer.done)

    def reserve(self, name: str, num_blocks: int, tier: Tier, timeout: float, payer: Payer) -> Reservation:
        """Ask `name` to set blocks aside. Raises OutOfBlocks as the peer did, TransferTimeout, and what ask() does."""
        peer = self._peer(name)
        with self._lock:
            self._require_known(peer)
            question = self._questions.ask(peer, num_blocks, tier, self._settings.lease_s, payer)
        self._pump(peer)
        if not question.wait(timeout):
            self._questions.drop(question)
            raise TransferTimeout(f"{name} did not answer within {timeout} s", peer=name, reason="timeout")
        if question.error is not None:
            raise question.error
        return Reservation(name, question.epoch, question.reservation, num_blocks)

    def unreserve(self, reservation: Reservation) -> None:
        """Give a reservation back unused. Best effort: it ends with its lease, or with the peer, anyway."""
        with self._lock:
            peer = self._peers.get(reservation.peer)
            if peer is not None and peer.ready and peer.epoch == reservation.epoch:
                self._tell(peer, messages.Unreserve(reservation.number))

    def tick(self, now: float) -> float:
        """Ends what ran out of time; returns when it wants to be called again."""
        with self._lock:
            expired = self._book.expired(now) if self._book.next_deadline() <= now else []
        for offer in expired:
            what = "its lease ended" if offer.number > 0 else "it waited too long for its turn"
            message = (
                f"transfer of {offer.transfer.num_blocks} blocks to {offer.peer} failed: {what} after "
                f"{offer.lease_s:g} s; raise lease_s or send less at once"
            )
            self._finish(offer, TransferTimeout(message, peer=offer.peer, reason="lease"))
        dials = self._dialer.tick(now)
        with self._lock:
            return min(dials, self._book.next_deadline())

    def close(self) -> None:
        """Take everything back. Idempotent. hang_up_all() closes the links, once the loop has stopped."""
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
        for peer in peers:
            self._abandon(peer, InstanceClosed(f"{self._home.instance} is closing"))

    def hang_up_all(self) -> None:
        for peer in self._peers.values():
            self._dialer.hang_up(peer)

    def stats(self) -> SenderStats:
        with self._lock:
            peers = {p.name: (p.requested, p.scheme) for p in self._peers.values()}
            return SenderStats(
                open_offers=self._book.num_open, waiting_offers=self._book.num_waiting, transports=peers, **self._counts
            )  # fmt: skip

    def check(self) -> None:
        """Asserts all invariants."""
        with self._lock:
            self._book.check()
            words = sorted(int(word) for word in self._home.leases.words if word)
            assert words == self._book.open_numbers(), "lease words and open offers differ"

    # --- offers ------------------------------------------------------------------------------------------------

    def _pump(self, peer: Peer) -> None:
        """Send what may go now; dial when there is no connection."""
        with self._lock:
            if self._peers.get(peer.name) is not peer:
                return  # disconnected meanwhile: what was on its way has failed, and nobody would close a new link
            launched = self._send_waiting(peer)
        self._follow_up(peer, launched)

    def _send_waiting(self, peer: Peer) -> list[Launched]:
        """Send what may go now; dial when there is no connection. Under the lock; then _follow_up() without it."""
        done: list[Launched] = []
        if not peer.ready:
            self._loop.call_soon(lambda: self._dialer.dial(peer))
            return done
        for question in self._questions.unsent(peer):
            question.sent = self._tell(peer, question.message)
        while (offer := self._book.admit(peer.name)) is not None:
            now = time.monotonic()
            if self._launcher.has_waited(offer, now):
                self._book.extend(offer, now + offer.lease_s)
            try:
                if not self._launcher.launch(peer, offer):
                    self._book.recall(offer)
                    break
                done.append((offer, None))
            except PoolweaveError as problem:
                done.append((offer, problem))
            except Exception as problem:  # noqa: BLE001  # this offer fails alone
                done.append((offer, TransferFailed(f"internal error: {problem!r}", reason="internal")))
        return done

    def _follow_up(self, peer: Peer, launched: list[Launched]) -> None:
        """End what could not be launched, or needs nothing to be sent; tell what of a growing offer is ready."""
        for offer, error in launched:
            if error is not None:
                self._finish(offer, error)
            elif peer.route is None:  # other ranks send all that it needs
                self._finish(offer, messages.Confirm(offer.number, 0, 0, 0))
            elif offer.growth is not None:
                self._grower.tell(offer)

    def _finish(self, offer: OpenOffer, end: PoolweaveError | messages.Confirm) -> bool:
        """Take the offer back and tell its Transfer. False when it had ended before."""
        with self._lock:
            self._home.leases.clear(offer.number)
            if not self._book.close(offer):
                return False
            peer = self._peers.get(offer.peer)
            taken_back = isinstance(end, PoolweaveError) and offer.number > 0
            if taken_back and peer is not None and peer is offer.route and peer.ready:
                self._tell(peer, messages.Cancel(offer.number, offer.shipment.tag))
            waiting = self._book.has_waiting(offer.peer)
            self._count(end)
        try:
            if offer.scheme:
                self._transports[offer.scheme].revoke(offer)
            self._store.give_back(offer.loan)
        finally:  # whatever the store says, nobody waits for ever
            if isinstance(end, PoolweaveError):
                offer.transfer._fail(end)
            else:
                offer.transfer._succeed(end, len(offer.growth.steps) if offer.growth is not None else 1)
        if waiting and peer is not None and not self._closed:
            self._pump(peer)
        return True

    def _count(self, end: PoolweaveError | messages.Confirm) -> None:
        """Under the lock."""
        if not isinstance(end, PoolweaveError):
            self._counts["done"] += 1
            self._counts["bytes"] += end.nbytes
            return
        self._counts["failed"] += 1
        reason = getattr(end, "reason", None)
        if reason in ("lease", "cancelled"):
            self._counts["expired" if reason == "lease" else "cancelled"] += 1

    def _abandon(self, peer: Peer, error: PoolweaveError, *, only_sent: bool = False) -> None:
        with self._lock:
            offers = [o for o in self._book.of_peer(peer.name) if o.route is peer and (o.number > 0 or not only_sent)]
        for offer in offers:
            self._finish(offer, error)
        self._questions.abandon(peer, error, only_sent=only_sent)

    # --- peers: hooks of the dialer, on the loop's thread --------------------------------------------------------

    def _hello(self, peer: Peer, link: Link) -> tuple[messages.Hello, Sequence[int]]:
        data_address, fds = self._transports[peer.scheme].introduce(link.sock)
        hello = messages.Hello(
            instance=self._home.instance,
            epoch=self._home.epoch,
            peer=peer.name,
            nonce=peer.nonce,
            fingerprint=self._home.shard.cut.layout.fingerprint(),
            seat=self._home.shard.seat,
            scheme=peer.scheme,
            data_address=data_address,
            spaces=self._home.memory.spaces,
        )
        return hello, fds

    def _on_ready(self, peer: Peer) -> None:
        self._pump(peer)

    def _on_failed(self, peer: Peer, error: PoolweaveError) -> None:
        self._abandon(peer, error)

    def _on_lost(self, peer: Peer, error: PoolweaveError) -> None:
        self._abandon(peer, error, only_sent=True)
        with self._lock:
            known = self._peers.get(peer.name) is peer
            waiting = self._book.has_waiting(peer.name) or bool(self._questions.unsent(peer))
        if known and waiting:
            self._dialer.dial(peer)

    def _on_frame(self, peer: Peer, payload: bytes) -> None:
        answer = decode(ANSWERS, payload)
        if isinstance(answer, messages.Reserved):
            if not self._questions.answer(answer.request, answer.reservation, None):
                self._tell(peer, messages.Unreserve(answer.reservation))  # it came too late: nobody knows it
            return
        if isinstance(answer, messages.Failed) and answer.offer < 0:
            error = revive(answer.error, answer.message, answer.numbers, peer.name)
            self._questions.answer(answer.offer, 0, error)
            return
        with self._lock:
            offer = self._book.find(answer.offer)
        if offer is None or offer.route is not peer:
            return  # it ended here while the answer was on its way
        if isinstance(answer, messages.Progress):
            offer.transfer._advance(answer.done_blocks / max(1, answer.total_blocks))
        elif isinstance(answer, messages.Confirm):
            self._finish(offer, answer)
        else:
            self._finish(offer, revive(answer.error, answer.message, answer.numbers, peer.name))

    def _tell(self, peer: Peer, message: messages.Request) -> bool:
        """Send if the connection lives. Under the lock."""
        link = peer.link  # the loop's thread may take it away meanwhile
        if link is None:
            return False
        try:
            link.send(encode(message))
        except TransferFailed:
            return False  # the loss is reported by the link itself
        return True

    def _tell_ready(self, offer: OpenOffer, ready: messages.Ready) -> bool:
        """False when the offer has ended or its connection is gone."""
        peer = offer.route
        assert isinstance(peer, Peer)
        with self._lock:
            if self._book.find(ready.offer) is not offer or not peer.ready:
                return False
            self._book.extend(offer, time.monotonic() + offer.lease_s)  # of a growing offer it begins with each step
            self._transports[offer.scheme].publish(offer, ready.step)
            return self._tell(peer, ready)

    def _forget(self, peer: Peer, error: PoolweaveError) -> None:
        self._abandon(peer, error)
        self._loop.call_soon(lambda: self._dialer.hang_up(peer))

    def _peer(self, name: str) -> Peer:
        with self._lock:
            self._require_open()
            peer = self._peers.get(name)
        if peer is None:
            raise UnknownPeer(f"no address is known for {name}; connect() it first", peer=name)
        return peer

    def _require_known(self, peer: Peer) -> None:
        """Under the lock. Between _peer() and here its name may have been disconnected."""
        self._require_open()
        if self._peers.get(peer.name) is not peer:
            raise UnknownPeer(
                f"{peer.name} was disconnected, or connected at another address, meanwhile; try again", peer=peer.name
            )

    def _require_open(self) -> None:
        if self._closed:
            raise InstanceClosed(f"the transfer engine of {self._home.instance} is closed")
