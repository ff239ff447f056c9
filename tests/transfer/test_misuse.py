"""What callers do around a transfer must not reach other transfers, and nothing of theirs is read after offer()."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ref_transfer_world import LAYOUT, World

from poolweave.errors import ConfigError, DuplicateTransfer, ProtocolError, TransferFailed, UnknownPeer
from poolweave.transfer import Arrival, Shipment, Transfer
from poolweave.transfer.arrivals import ArrivalBook, _Waiter
from poolweave.transfer.fetcher import Fetcher
from poolweave.transfer.messages import Cancel, Hello, Space
from poolweave.types import Tier

MakeWorld = Callable[[str], World]


def test_a_callback_that_raises_hurts_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = world.pair()
    added, commit = threading.Event(), b.store.commit
    monkeypatch.setattr(b.store, "commit", lambda placement: commit(placement) if added.wait(10) else None)
    first = a.engine.offer(b.name, a.shipment(1, tag=b"1"))
    first.add_done_callback(lambda transfer: 1 // 0)
    added.set()
    first.result(10)
    assert a.engine.offer(b.name, a.shipment(1, tag=b"2")).result(10).pulled_blocks == 1
    assert "a callback of the transfer b'1'" in caplog.text
    for tag in (b"1", b"2"):
        b.engine.receive(tag, 10).close()


def test_an_event_loop_that_ended_hurts_nobody(world: World) -> None:
    a, b = world.pair()
    started = []

    async def leave() -> None:
        started.append(a.engine.offer(b.name, a.shipment(1, tag=b"1")))
        task = asyncio.ensure_future(asyncio.wait_for(_await(started[0]), 30))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leave())
    started[0].result(10)
    assert a.engine.offer(b.name, a.shipment(1, tag=b"2")).result(10).pulled_blocks == 1
    for tag in (b"1", b"2"):
        b.engine.receive(tag, 10).close()


async def _await(transfer: Transfer) -> None:
    await transfer


def test_arrays_may_be_used_again_at_once() -> None:
    tokens, blocks = np.arange(16, dtype=np.int32), np.array([7], np.uint64)
    shipment = Shipment(blocks=blocks, num_tokens=np.int64(16), tokens=tokens, insert=True)  # type: ignore[arg-type]
    tokens[:], blocks[:] = 9, 9
    assert shipment.tokens is not None
    assert shipment.tokens.tolist() == list(range(16))
    assert shipment.blocks.tolist() == [7]
    assert type(shipment.num_tokens) is int


@pytest.mark.parametrize("wrong", [{"tag": "text"}, {"tag": None}, {"identity": "x" * 16}, {"tenant": "x" * 16}])
def test_only_bytes_are_tags_and_identities(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="is bytes, got"):
        Shipment(blocks=np.empty(0, np.uint64), num_tokens=0, **wrong)


def test_no_tier_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="names no tier"):
        Shipment(blocks=np.empty(0, np.uint64), num_tokens=0, on_demand=Tier(0))


def test_a_peer_forgotten_while_an_offer_is_prepared(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = world.pair()
    checksums = a.engine._sender._launcher._checksums
    assert checksums is not None
    sums = checksums.of_loan

    def slow(*arguments: Any) -> Any:
        a.engine.disconnect(b.name)
        return sums(*arguments)

    monkeypatch.setattr(checksums, "of_loan", slow)
    with pytest.raises(UnknownPeer):
        a.engine.offer(b.name, a.shipment(2, tag=b"x"))
    assert sum(a.store.loans.values()) == 0


def test_a_connection_lost_while_an_offer_is_sent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's thread takes the link away without the sender's lock, at any moment."""
    a, b = world.pair()
    a.engine.offer(b.name, a.shipment(1)).result(10)
    sender = a.engine._sender
    peer, transport = sender._peers[b.name], a.engine._transports[world.listen]
    link, publish = peer.link, transport.publish

    def lose(offer: Any) -> None:
        publish(offer)
        peer.link = None

    monkeypatch.setattr(transport, "publish", lose)
    assert a.engine.offer(b.name, a.shipment(2)).result(10).pulled_blocks == 2  # it had the link in hand
    waiting = a.engine.offer(b.name, a.shipment(2))  # and here it was gone before
    assert a.engine.stats().sending.waiting_offers == 1
    monkeypatch.setattr(transport, "publish", publish)
    peer.link = link
    sender._pump(peer)
    assert waiting.result(10).pulled_blocks == 2
    assert sum(a.store.loans.values()) == 0


def test_a_cancel_that_comes_after_the_last_byte(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver is past its last look at it: what it has is dropped all the same, and the tag is free."""
    a, b = world.pair()
    receiver, commit = b.engine._receiver, b.store.commit

    def late(placement: Any) -> Any:
        monkeypatch.setattr(b.store, "commit", commit)
        (session,) = receiver._sessions
        (offer,) = session.jobs
        receiver._fetcher.cancel(session, Cancel(offer, b"c"))
        return commit(placement)

    monkeypatch.setattr(b.store, "commit", late)
    monkeypatch.setattr(sys.modules[Fetcher.__module__], "_INLINE_BYTES", 0)
    with pytest.raises(TransferFailed):
        a.engine.offer(b.name, a.shipment(1, tag=b"c")).result(10)
    with pytest.raises(TransferFailed):
        b.engine.receive(b"c", 10)
    assert b.store.in_use() == 0
    a.engine.offer(b.name, a.shipment(1, tag=b"c")).result(10)
    b.engine.receive(b"c", 10).close()


def test_a_receiver_that_is_interrupted_takes_nothing_along() -> None:
    dropped: list[int] = []
    book = ArrivalBook()

    class Interrupted:
        """A gate at which a signal arrives, before or after what it waits for."""

        def __init__(self, deliver: bool) -> None:
            self.deliver = deliver

        def acquire(self, timeout: float) -> bool:
            if self.deliver:
                book.settle(b"t", 1, _arrival(dropped))
            raise KeyboardInterrupt

        def release(self) -> None:
            pass

    for deliver in (False, True):
        book.announce(b"t", 1, 1e9)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Waiter, "__post_init__", lambda waiter, d=deliver: setattr(waiter, "gate", Interrupted(d)))
            with pytest.raises(KeyboardInterrupt):
                book.claim(b"t", 5)
        if not deliver:
            assert book.settle(b"t", 1, _arrival(dropped))  # nobody waits: it is kept
        book.check()
        assert book.num_unclaimed == 1
        with pytest.raises(DuplicateTransfer):
            book.announce(b"t", 2, 1e9)
        book.claim(b"t", 0).close()
    assert dropped == [1, 1]


def _arrival(dropped: list[int]) -> Arrival:
    return Arrival("a", b"t", np.array([1], np.uint64), 16, None, 1, lambda blocks: dropped.extend(blocks.tolist()))


def test_memory_of_the_wrong_size_leaves_no_descriptor(make_world: MakeWorld) -> None:
    node = make_world("shm").node()
    space = Space(Tier.HBM.value, 4096, 1, 4096, 4096, 64)
    hello = Hello("x", 1, node.name, bytes(16), LAYOUT.fingerprint(), "shm", "", (space,))
    fds = [os.memfd_create("misused-tier"), os.memfd_create("misused-words")]  # the lease table is empty
    with pytest.raises(ProtocolError):
        node.engine._transports["shm"].attach(hello, fds, LAYOUT)
    kept = [link for link in _descriptors() if "misused" in link]
    assert not kept


def _descriptors() -> Iterator[str]:
    """What this process's descriptors are of; one that another thread closes meanwhile is left out."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{fd}")


def test_the_advertised_address_is_the_address(make_world: MakeWorld) -> None:
    node = make_world("tcp://0.0.0.0:0").node(advertise="tcp://10.1.2.3:5000")
    assert node.engine.address == "tcp://10.1.2.3:5000"
    assert node.engine.addresses == {"tcp": node.engine.address}
