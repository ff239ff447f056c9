"""The sender's open offers: numbers, tags, leases and the bytes in flight to each peer. Pure: the caller has the clock.

    waiting --admit--> open --close--> gone         a waiting offer holds its loan but no lease word yet
Offers wait when their peer has `max_bytes` in flight (one offer always may go) or all lease words are taken.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import defaultdict
from dataclasses import dataclass, field

import msgspec

from poolweave.errors import DuplicateTransfer
from poolweave.transfer._native import Extents, Window
from poolweave.transfer.growth import Coverage, Stretch
from poolweave.transfer.leases import NUM_SLOTS, SLOT_BITS, slot_of
from poolweave.transfer.messages import encode_offer
from poolweave.transfer.regions import OwnMemory
from poolweave.transfer.shipment import Shipment, Transfer
from poolweave.transfer.store import Loan

_MOST_STALE = 64  # deadlines of ended offers that are kept beside twice the live ones


@dataclass(frozen=True, slots=True)
class Step:
    """A stretch as it was told to the peer: `windows` of each of its blocks move; none: whole blocks."""

    stretch: Stretch
    windows: tuple[Window, ...]


@dataclass(slots=True, eq=False)
class Growth:
    """How far a growing offer is: what its owner sealed, and the `steps` of it that the peer was told.

    `lock` is held while steps are made and told, one after the other; take it before the sender's.
    """

    coverage: Coverage
    sealed: list[Stretch] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    num_told: int = 0  # of `sealed`: stretches that the peer needs nothing of make no step
    lock: threading.RLock = field(default_factory=threading.RLock)


class OpenOffer(msgspec.Struct, eq=False):
    """One shipment on its way. `number` is 0 until admitted; `deadline` is when its lease (or its wait) ends."""

    peer: str
    shipment: Shipment
    loan: Loan
    nbytes: int
    priority: int
    lease_s: float
    deadline: float
    transfer: Transfer
    number: int = 0
    nonce: int = 0
    checksums: bytes = b""
    scheme: str = ""
    route: object = None  # the Peer it was made for: a name may be connected anew meanwhile
    growth: Growth | None = None  # of a growing offer

    @property
    def is_hashed_late(self) -> bool:
        """Its blocks are sealed, and it grows all the same: stretch by stretch, as their checksums are made."""
        return self.growth is not None and not self.shipment.growing

    def extents(self, memory: OwnMemory, step: int) -> Extents:
        """The runs of all blocks, or of what a growing offer's step moves."""
        if not step:
            return memory.extents(self.loan.tiers, self.loan.slots)
        assert self.growth is not None
        one = self.growth.steps[step - 1]
        rows = slice(one.stretch.first_block, one.stretch.end_block)
        return memory.extents(self.loan.tiers[rows], self.loan.slots[rows], one.windows)

    def message(self) -> bytes:
        """What the receiver is told: a messages.Offer, in the order of its fields."""
        shipment, loan = self.shipment, self.loan
        return encode_offer(
            self.number,
            self.nonce,
            self.lease_s,
            shipment.tag,
            len(loan.blocks),
            shipment.num_tokens,
            loan.tiers.tobytes(),
            loan.slots.tobytes(),
            self.checksums,
            shipment.identity,
            shipment.tenant,
            shipment.tokens.tobytes() if shipment.tokens is not None else None,
            shipment.insert,
            shipment.private,
            shipment.on_demand.value if shipment.on_demand is not None else 0,
            shipment.dst.number if shipment.dst is not None else 0,
            self.growth is not None,
        )


@dataclass(slots=True)
class _Lane:
    """What goes to one peer."""

    in_flight: int = 0
    num_open: int = 0
    waiting: list[tuple[int, int, OpenOffer]] = field(default_factory=list)  # heap by (-priority, arrival)

    @property
    def has_waiting(self) -> bool:
        """Some in the heap may have been closed while they waited."""
        return bool(self.waiting) and any(offer.number == 0 for _, _, offer in self.waiting)


class OfferBook:
    """Not thread-safe: its owner holds a lock."""

    def __init__(self, max_bytes: int, num_slots: int = NUM_SLOTS) -> None:
        self._max_bytes = max_bytes
        self._free = list(range(num_slots))  # a heap: lowest word first
        self._serial = itertools.count(1)
        self._arrival = itertools.count()
        self._open: dict[int, OpenOffer] = {}
        self._tags: dict[tuple[str, bytes], OpenOffer] = {}
        self._lanes: dict[str, _Lane] = defaultdict(_Lane)
        self._live: dict[int, OpenOffer] = {}  # by id(), waiting and open
        self._heap: list[tuple[float, int, OpenOffer]] = []  # (deadline, tie); stale once the offer's deadline differs

    def add(self, offer: OpenOffer) -> None:
        """Queue an offer. Raises DuplicateTransfer when its (peer, tag) is on its way already; then nothing changed."""
        tag = offer.shipment.tag
        if tag:
            if (offer.peer, tag) in self._tags:
                raise DuplicateTransfer(f"a transfer {tag!r} to {offer.peer} is on its way; use another tag", tag=tag)
            self._tags[offer.peer, tag] = offer
        self._live[id(offer)] = offer
        self._push_deadline(offer)
        heapq.heappush(self._lanes[offer.peer].waiting, (-offer.priority, next(self._arrival), offer))

    def has_room(self, peer: str, nbytes: int) -> bool:
        """Whether another offer to `peer` would go at once."""
        lane = self._lanes.get(peer)
        fits = lane is None or not lane.num_open or lane.in_flight + nbytes <= self._max_bytes
        return bool(self._free) and fits and not self.has_waiting(peer)

    def admit(self, peer: str) -> OpenOffer | None:
        """The next offer that may go to `peer` now, given its number; None when none may."""
        lane = self._lanes[peer]
        while lane.waiting and lane.waiting[0][2].number < 0:  # closed while it waited
            heapq.heappop(lane.waiting)
        if not lane.waiting or not self._free:
            return None
        offer = lane.waiting[0][2]
        if lane.num_open and lane.in_flight + offer.nbytes > self._max_bytes:
            return None
        heapq.heappop(lane.waiting)
        offer.number = next(self._serial) << SLOT_BITS | heapq.heappop(self._free)
        lane.in_flight += offer.nbytes
        lane.num_open += 1
        self._open[offer.number] = offer
        return offer

    def recall(self, offer: OpenOffer) -> None:
        """Put an admitted offer back in front of those that wait: its connection was gone when it was sent."""
        lane = self._lanes[offer.peer]
        self._retire_number(offer, lane)
        offer.number = 0
        heapq.heappush(lane.waiting, (-offer.priority, -next(self._arrival), offer))

    def find(self, number: int) -> OpenOffer | None:
        return self._open.get(number)

    def extend(self, offer: OpenOffer, deadline: float) -> None:
        """Give an offer another deadline: its lease begins when it is sent."""
        offer.deadline = deadline
        self._push_deadline(offer)

    def close(self, offer: OpenOffer) -> bool:
        """Take an offer out, waiting or open; its word may be used again. False when it was out before."""
        if self._live.pop(id(offer), None) is None:
            return False
        if offer.shipment.tag:
            del self._tags[offer.peer, offer.shipment.tag]
        lane = self._lanes[offer.peer]
        if offer.number > 0:
            self._retire_number(offer, lane)
        else:
            offer.number = -1
        if not lane.num_open and not lane.has_waiting:
            del self._lanes[offer.peer]
        return True

    def of_peer(self, peer: str) -> list[OpenOffer]:
        """All offers to `peer`, open and waiting."""
        return [offer for offer in self._live.values() if offer.peer == peer]

    def expired(self, now: float) -> list[OpenOffer]:
        """The offers whose deadline is not after `now`, oldest first; they stay until closed."""
        if self.next_deadline() > now:
            return []
        return sorted((o for o in self._live.values() if o.deadline <= now), key=lambda o: o.deadline)

    def next_deadline(self) -> float:
        heap = self._heap
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def has_waiting(self, peer: str) -> bool:
        return peer in self._lanes and self._lanes[peer].has_waiting

    def in_flight_bytes(self, peer: str) -> int:
        return self._lanes[peer].in_flight if peer in self._lanes else 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        return len(self._live) - len(self._open)

    def open_numbers(self) -> list[int]:
        return sorted(self._open)

    def check(self) -> None:
        """Asserts all invariants."""
        for peer, lane in self._lanes.items():
            mine = [offer for offer in self._open.values() if offer.peer == peer]
            assert lane.in_flight == sum(offer.nbytes for offer in mine), "bytes in flight do not add up"
            assert lane.num_open == len(mine), "open offers do not add up"
        slots = [slot_of(number) for number in self._open]
        assert len(set(slots)) == len(slots), "two offers share a lease word"
        assert not set(slots) & set(self._free), "a lease word is free and used"
        assert set(self._open.values()) <= set(self._live.values()), "an open offer is not live"
        current = {id(entry[2]) for entry in self._heap if self._is_current(entry)}
        assert current == set(self._live), "deadlines and offers differ"
        tagged = [offer for offer in self._live.values() if offer.shipment.tag]
        assert len(tagged) == len(self._tags), "tags and offers differ"

    def _push_deadline(self, offer: OpenOffer) -> None:
        if len(self._heap) > 2 * len(self._live) + _MOST_STALE:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (offer.deadline, next(self._arrival), offer))

    def _is_current(self, entry: tuple[float, int, OpenOffer]) -> bool:
        return entry[2].deadline == entry[0] and id(entry[2]) in self._live

    def _retire_number(self, offer: OpenOffer, lane: _Lane) -> None:
        del self._open[offer.number]
        heapq.heappush(self._free, slot_of(offer.number))
        lane.in_flight -= offer.nbytes
        lane.num_open -= 1
