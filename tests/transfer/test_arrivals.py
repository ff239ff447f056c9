"""The receiver's book under random arrivals, claims, failures and times: every reference dropped exactly once."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from poolweave.errors import (
    DuplicateTransfer,
    InstanceClosed,
    OutOfBlocks,
    PoolweaveError,
    TransferFailed,
    TransferTimeout,
)
from poolweave.transfer import Arrival
from poolweave.transfer.arrivals import ERROR_KEPT_S, ArrivalBook
from poolweave.types import UInt64Array

TAGS = st.sampled_from([b"1", b"2", b"3"])


class Arrivals(RuleBasedStateMachine):
    """The model: a tag is absent, 'pulled' (announced), an Arrival, or an error."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.book = ArrivalBook(clock=lambda: self.now)
        self.state: dict[bytes, tuple[object, float, str]] = {}
        self.unwanted: dict[bytes, float] = {}
        self.held: set[int] = set()
        self.count = 0

    def release(self, blocks: UInt64Array) -> None:
        for one in blocks.tolist():
            self.held.remove(one)

    def arrival(self, tag: bytes) -> Arrival:
        self.count += 1
        self.held.add(self.count)
        return Arrival("a", tag, np.array([self.count], np.uint64), 16, None, 1, self.release)

    @rule(tag=TAGS, lease=st.floats(0.1, 5))
    def announce(self, tag: bytes, lease: float) -> None:
        owner = object()
        if tag in self.state and self.state[tag][2] != "failed":
            with pytest.raises(DuplicateTransfer):
                self.book.announce(tag, owner, self.now + lease)
            return
        self.book.announce(tag, owner, self.now + lease)
        self.state[tag] = (owner, self.now + lease, "pulled")

    @rule(tag=TAGS, mine=st.booleans())
    def settle(self, tag: bytes, mine: bool) -> None:
        owner, deadline, state = self.state.get(tag, (None, 0.0, "absent"))
        if state == "here":
            return  # settled once only
        one = self.arrival(tag)
        if not self.book.settle(tag, owner if mine else object(), one):
            assert not mine or state == "absent" or state == "failed"
            one.close()
        elif state == "pulled":
            self.state[tag] = (owner, deadline, "here")
            if tag in self.unwanted:
                del self.state[tag]

    @rule(tag=TAGS)
    def fail(self, tag: bytes) -> None:
        owner, deadline, state = self.state.get(tag, (None, 0.0, "absent"))
        self.book.fail(tag, owner, TransferFailed("x"))
        if state == "pulled":
            self.state[tag] = (owner, max(deadline, self.now + ERROR_KEPT_S), "failed")

    @rule(tag=TAGS)
    def withdraw(self, tag: bytes) -> None:
        owner, deadline, state = self.state.get(tag, (None, 0.0, "absent"))
        self.book.withdraw(tag, owner, TransferFailed("x"))
        if state in ("pulled", "here"):
            self.state[tag] = (owner, max(deadline, self.now + ERROR_KEPT_S), "failed")

    @rule(tag=TAGS, seconds=st.floats(0.1, 5))
    def discard(self, tag: bytes, seconds: float) -> None:
        self.book.discard(tag, self.now + seconds)
        if self.state.get(tag, (None, 0.0, "absent"))[2] in ("here", "failed"):
            del self.state[tag]
        else:
            self.unwanted[tag] = self.now + seconds

    @rule(tag=TAGS)
    def claim(self, tag: bytes) -> None:
        state = self.state.get(tag, (None, 0.0, "absent"))[2]
        if state == "here":
            with self.book.claim(tag, 0) as got:
                assert got.tag == tag
            del self.state[tag]
        elif state == "failed":
            with pytest.raises(TransferFailed):
                self.book.claim(tag, 0)
            del self.state[tag]
        else:
            with pytest.raises(TransferFailed) as caught:
                self.book.claim(tag, 0)
            assert caught.type is (TransferFailed if tag in self.unwanted else TransferTimeout)

    @rule(step=st.floats(0, 3))
    def pass_time(self, step: float) -> None:
        self.now += step
        self.unwanted = {tag: until for tag, until in self.unwanted.items() if until > self.now}
        ended = {t for t, (_, deadline, state) in self.state.items() if state != "pulled" and deadline <= self.now}
        dropped = self.book.expire(self.now)
        assert dropped == sum(self.state[tag][2] == "here" for tag in ended)
        for tag in ended:
            del self.state[tag]

    @invariant()
    def agrees(self) -> None:
        self.book.check()
        here = sum(state == "here" for _, _, state in self.state.values())
        assert self.book.num_unclaimed == here
        assert len(self.held) == here

    def teardown(self) -> None:
        self.book.close()
        assert not self.held
        with pytest.raises(InstanceClosed):
            self.book.claim(b"1", 0)


Arrivals.TestCase.settings = settings(stateful_step_count=40)
TestArrivals = Arrivals.TestCase


@pytest.mark.parametrize("end", ["settle", "fail", "discard", "close"])
def test_a_waiting_receiver_gets_the_arrival_or_its_error(end: str) -> None:
    book, got = ArrivalBook(), queue.SimpleQueue[object]()
    sent = Arrival("a", b"t", np.empty(0, np.uint64), 0, None, 0, lambda _: None)

    def claim() -> None:
        try:
            got.put(book.claim(b"t", 60))
        except PoolweaveError as error:
            got.put(error)

    waiting = threading.Thread(target=claim)
    waiting.start()
    while not book._waiters:  # until it waits: what comes before that is another case
        threading.Event().wait(0.001)
    book.announce(b"t", 1, 1e9)
    if end == "settle":
        assert book.settle(b"t", 1, sent)
    elif end == "fail":
        book.fail(b"t", 1, OutOfBlocks("x", needed=3))
    elif end == "discard":
        book.discard(b"t", 1e9)
    else:
        book.close()
    answer = got.get(timeout=60)
    waiting.join(60)
    assert (answer is sent) == (end == "settle")
    if end == "fail":
        assert isinstance(answer, OutOfBlocks)
        assert answer.needed == 3
    elif end == "discard":
        assert isinstance(answer, TransferFailed)
        assert answer.reason == "cancelled"
    elif end == "close":
        assert isinstance(answer, InstanceClosed)
    book.close()
