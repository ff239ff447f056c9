"""The sender's book under random offers, ends and times, against plain lists."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from poolweave.errors import DuplicateTransfer
from poolweave.transfer import Loan, Shipment, Transfer
from poolweave.transfer.leases import LeaseTable, slot_of
from poolweave.transfer.offers import OfferBook, OpenOffer

PEERS = ["a", "b"]
MOST = 10


def offer_to(peer: str, tag: bytes, nbytes: int, deadline: float, priority: int = 0) -> OpenOffer:
    blocks = np.zeros(1, np.uint64)
    loan = Loan(blocks, np.zeros(1, np.uint8), np.zeros(1, np.int32))
    return OpenOffer(
        peer=peer,
        shipment=Shipment(blocks=blocks, num_tokens=16, tag=tag),
        loan=loan,
        nbytes=nbytes,
        priority=priority,
        lease_s=1.0,
        deadline=deadline,
        transfer=Transfer(peer, tag, 1),
    )


class Offers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book = OfferBook(MOST, num_slots=3)
        self.now = 0.0
        self.waiting: list[OpenOffer] = []
        self.open: list[OpenOffer] = []
        self.numbers: set[int] = set()

    @rule(peer=st.sampled_from(PEERS), tag=st.sampled_from([b"", b"1", b"2"]), nbytes=st.integers(0, 15),
          lease=st.floats(0.1, 5), priority=st.integers(0, 2))  # fmt: skip
    def add(self, peer: str, tag: bytes, nbytes: int, lease: float, priority: int) -> None:
        offer = offer_to(peer, tag, nbytes, self.now + lease, priority)
        taken = tag and any(o.peer == peer and o.shipment.tag == tag for o in self.waiting + self.open)
        if taken:
            with pytest.raises(DuplicateTransfer):
                self.book.add(offer)
        else:
            self.book.add(offer)
            self.waiting.append(offer)

    @rule(peer=st.sampled_from(PEERS))
    def admit(self, peer: str) -> None:
        mine = [o for o in self.waiting if o.peer == peer]
        in_flight = [o.nbytes for o in self.open if o.peer == peer]
        best = max((o.priority for o in mine), default=None)
        offer = self.book.admit(peer)
        if offer is None:
            full = len(self.open) == 3
            heavy = bool(in_flight) and any(sum(in_flight) + o.nbytes > MOST for o in mine if o.priority == best)
            assert not mine or full or heavy
            return
        assert offer in mine
        assert offer.priority == best
        assert not in_flight or sum(in_flight) + offer.nbytes <= MOST
        assert offer.number not in self.numbers, "a number came twice"
        self.numbers.add(offer.number)
        self.waiting.remove(offer)
        self.open.append(offer)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def recall(self, data: st.DataObject) -> None:
        offer = data.draw(st.sampled_from(self.open))
        self.book.recall(offer)
        self.open.remove(offer)
        self.waiting.append(offer)

    @precondition(lambda self: self.open or self.waiting)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        offer = data.draw(st.sampled_from(self.open + self.waiting))
        assert self.book.close(offer)
        assert not self.book.close(offer)
        (self.open if offer in self.open else self.waiting).remove(offer)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), lease=st.floats(0.1, 5))
    def extend(self, data: st.DataObject, lease: float) -> None:
        self.book.extend(data.draw(st.sampled_from(self.open)), self.now + lease)

    @rule(step=st.floats(0, 3))
    def pass_time(self, step: float) -> None:
        self.now += step
        expired = self.book.expired(self.now)
        assert {id(o) for o in expired} == {id(o) for o in self.open + self.waiting if o.deadline <= self.now}
        assert [o.deadline for o in expired] == sorted(o.deadline for o in expired)

    @invariant()
    def agrees(self) -> None:
        self.book.check()
        assert (self.book.num_open, self.book.num_waiting) == (len(self.open), len(self.waiting))
        assert self.book.next_deadline() == min((o.deadline for o in self.open + self.waiting), default=math.inf)
        for peer in PEERS:
            assert self.book.has_waiting(peer) == any(o.peer == peer for o in self.waiting)
            in_flight = [o.nbytes for o in self.open if o.peer == peer]
            assert self.book.in_flight_bytes(peer) == sum(in_flight)
            free = len(self.open) < 3 and not self.book.has_waiting(peer)
            assert self.book.has_room(peer, MOST // 2) == (
                free and (not in_flight or sum(in_flight) + MOST // 2 <= MOST)
            )
        for offer in self.open:
            assert self.book.find(offer.number) is offer


Offers.TestCase.settings = settings(stateful_step_count=40)
TestOffers = Offers.TestCase


def test_equal_priorities_go_in_order() -> None:
    book = OfferBook(1 << 30)
    offers = [offer_to("a", b"%d" % i, 1, 9.0) for i in range(5)]
    for one in offers:
        book.add(one)
    assert [book.admit("a") for _ in range(6)] == [*offers, None]


def test_an_offer_larger_than_the_limit_goes_alone() -> None:
    book = OfferBook(10)
    large, small = offer_to("a", b"1", 100, 9.0), offer_to("a", b"2", 1, 9.0)
    book.add(large)
    book.add(small)
    assert book.admit("a") is large
    assert book.admit("a") is None
    book.close(large)
    assert book.admit("a") is small


def test_a_cleared_word_of_another_offer_is_left_alone() -> None:
    table = LeaseTable()
    first, second = 1 << 14 | 3, 2 << 14 | 3
    assert slot_of(first) == slot_of(second)
    table.open(first)
    table.clear(first)
    table.open(second)
    table.clear(first)
    assert table.is_open(second)
    assert table.num_open() == 1
    table.close()
    table.close()
    assert table.num_open() == 0
