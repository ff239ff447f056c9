"""Launcher: turns shipments into offers and puts them on the wire. Keeps no book: its caller says what may go when."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import numpy as np

from poolweave.errors import TransferFailed
from poolweave.transfer.checksums import ChecksumCache
from poolweave.transfer.growing import STRETCH_BYTES, Grower
from poolweave.transfer.offers import OpenOffer
from poolweave.transfer.peers import Peer
from poolweave.transfer.sender_settings import SenderSettings
from poolweave.transfer.shipment import Shipment, Transfer
from poolweave.transfer.store import Loan
from poolweave.transfer.transport import Home, Transport

_DRAWN = 64
_FRESH = 0.99  # share of its lease that an offer sent at once has left


class Launcher:
    """`checksums`: None where none are sent. Thread-safe."""

    def __init__(
        self, home: Home, transports: Mapping[str, Transport], settings: SenderSettings,
        checksums: ChecksumCache | None, grower: Grower,
    ) -> None:  # fmt: skip
        self._home = home
        self._transports = transports
        self._settings = settings
        self._checksums = checksums
        self._grower = grower
        self._nonces = Nonces()

    def prepare(self, peer: Peer, shipment: Shipment, loan: Loan, priority: int, *, at_once: bool) -> OpenOffer:
        """The offer of lent blocks, with its checksums; its Transfer cannot be cancelled yet.

        Checksums of many bytes are left to be made while they are pulled, if the offer can go `at_once`.
        """
        lease_s = shipment.lease_s if shipment.lease_s is not None else self._settings.lease_s
        scheme = peer.scheme if peer.ready else peer.addresses[0].scheme
        growth, sums = None, b""
        if shipment.growing:
            growth = self._grower.begin(len(loan.blocks))
        elif not self._transports[scheme].in_place:
            if at_once and peer.ready and self._is_worth_growing(shipment, loan):
                growth = self._grower.begin_whole(len(loan.blocks))
            else:
                sums = self._sums(shipment, loan)
        return OpenOffer(
            peer=peer.name,
            shipment=shipment,
            loan=loan,
            nbytes=len(loan.blocks) * self._home.memory.block_bytes,
            priority=priority,
            lease_s=lease_s,
            deadline=time.monotonic() + lease_s,
            transfer=Transfer(peer.name, shipment.tag, len(loan.blocks)),
            checksums=sums,
            nonce=self._nonces.take(),
            route=peer,
            growth=growth,
        )

    def hash_now(self, offer: OpenOffer) -> None:
        """Make the checksums that were left to be made while the blocks are pulled."""
        offer.growth, offer.checksums = None, self._sums(offer.shipment, offer.loan)

    def launch(self, peer: Peer, offer: OpenOffer) -> bool:
        """Open the lease of an admitted offer and send it. False when the connection turned out to be gone: then
        nothing of it is open, and it waits for the next one.
        """
        link = peer.link  # the loop's thread may take it away meanwhile
        offer.scheme = peer.scheme
        if peer.route is None:
            return True
        if offer.growth is None and not peer.route.is_whole:
            offer.growth, offer.checksums = self._grower.begin_whole(len(offer.loan.blocks)), b""
        transport = self._transports[peer.scheme]
        if offer.growth is None and not offer.checksums and not transport.in_place:  # made for one that would need none
            offer.checksums = self._sums(offer.shipment, offer.loan)
        self._home.leases.open(offer.number)
        transport.publish(offer)
        try:
            if link is None:
                raise TransferFailed(f"the connection to {peer.name} is gone", peer=peer.name, reason="lost")
            link.send(offer.message())
        except TransferFailed as error:
            if error.reason not in ("closed", "lost"):
                raise
            self._home.leases.clear(offer.number)
            transport.revoke(offer)
            return False
        return True

    @staticmethod
    def has_waited(offer: OpenOffer, now: float) -> bool:
        """Its lease is to begin now, when it is sent."""
        return offer.deadline - now < _FRESH * offer.lease_s

    def _sums(self, shipment: Shipment, loan: Loan) -> bytes:
        """What the receiver compares. A growing offer tells them with each stretch."""
        if self._checksums is None or not len(loan.blocks):
            return b""
        return self._checksums.of_loan(loan, self._num_whole(shipment)).tobytes()

    def _is_worth_growing(self, shipment: Shipment, loan: Loan) -> bool:
        """Sealed blocks whose checksums take a while."""
        count = len(loan.blocks)
        large = count > 1 and count * self._home.memory.block_bytes >= 2 * STRETCH_BYTES
        return large and self._checksums is not None and not self._checksums.knows(loan, self._num_whole(shipment))

    def _num_whole(self, shipment: Shipment) -> int:
        return shipment.num_tokens // self._home.memory.layout.block_tokens


class Nonces:
    """Numbers of 63 bits that nobody foresees. Thread-safe. Drawn many at a time: a draw is a system call."""

    def __init__(self) -> None:
        self._drawn: list[int] = []

    def take(self) -> int:
        while True:
            try:
                return self._drawn.pop()
            except IndexError:
                self._drawn += (np.frombuffer(os.urandom(8 * _DRAWN), np.uint64) >> 1).tolist()
