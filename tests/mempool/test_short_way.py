"""Small offers taken in by one native call: the same outcome as step by step, and nothing left when it is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from poolweave.mempool import Blocks, MemPool, Quota, Quotas
from poolweave.mempool.short_way import ShortWay
from poolweave.transfer import MappedPeer, Offer, TransferConfig
from poolweave.transfer.checksums import ChecksumCache
from poolweave.transfer.messages import REQUESTS, Cancel, decode, encode
from poolweave.types import Tier

MakePool = Callable[..., MemPool]
TOKENS = np.arange(18, dtype=np.int32)  # four whole blocks and half of one
NUMBER = (1 << 14) + 5


class Desk:
    """A sender that lends, and the short way into a receiver, in one process."""

    def __init__(self, make_pool: MakePool, fill: Any) -> None:
        config = TransferConfig(listen="shm", lease_s=10)
        self.sender, self.receiver = make_pool(8, 8, transfer=config), make_pool(6, 8, transfer=config)
        self.blocks = self.sender.alloc(5)
        fill(self.sender, self.blocks, 1)
        self.sender.seal(self.blocks)
        home = self.sender._links.engine._home
        self.words = home.leases.words
        self.peer = MappedPeer(home.memory.tiers, self.words, home)
        ours = self.receiver._links.engine._home.memory.tiers
        way = self.receiver._store.short_way(ours, self.peer)
        assert way is not None
        self.way = way

    def offer(self, **changes: Any) -> Offer:
        loan = self.sender._store.lend(self.blocks.array)
        sums = ChecksumCache(self.sender._links.engine._home.memory, 1).of_loan(loan, 4)
        self.sender._store.give_back(loan)
        self.words[5] = NUMBER
        fields: dict[str, Any] = {
            "offer": NUMBER, "nonce": 1, "lease_s": 10.0, "tag": b"t", "num_blocks": 5, "num_tokens": 18,
            "tiers": loan.tiers.tobytes(), "slots": loan.slots.tobytes(), "checksums": sums.tobytes(),
            "identity": self.sender._catalogue.digest(None),
            "tenant": self.sender._catalogue.tenant_digest(None), "tokens": TOKENS.tobytes(), "insert": True,
            "private": False, "on_demand": Tier.HBM.value, "reservation": 0,
        }  # fmt: skip
        return Offer(**(fields | changes))

    def free(self) -> int:
        self.receiver.check()
        return self.receiver.stats().tiers[Tier.HBM].free


@pytest.fixture
def desk(make_pool: MakePool, fill: Any) -> Iterator[Desk]:
    one = Desk(make_pool, fill)
    yield one
    one.words[5] = 0


def test_it_is_what_the_long_way_does(desk: Desk, read: Any) -> None:
    taken = desk.way.take(desk.offer())
    assert taken is not None
    assert (taken.num_pulled, taken.num_calls) == (5, 1)
    assert taken.blocks is not None
    blocks = Blocks(taken.blocks)
    assert read(desk.receiver, blocks) == [1, 2, 3, 4, 5]
    assert desk.receiver.sealed_layers(blocks).tolist()[3:] == [desk.receiver.layout.num_layers, 0]
    with desk.receiver.match(TOKENS) as hit:
        assert hit.blocks == blocks[:4]
    desk.receiver.free(blocks)
    assert desk.free() == 2  # four stay as history
    again = desk.way.take(desk.offer(tag=b""))
    assert again is not None
    assert (again.num_pulled, again.blocks) == (1, None)  # nobody asked for a tag: no reference is left
    assert desk.free() == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"checksums": bytes(40)},
        {"slots": np.array([0, 1, 2, 3, 1 << 20], np.int32).tobytes()},
        {"tiers": bytes([1, 1, 1, 1, 9])},
        {"tokens": np.full(18, -1, np.int32).tobytes()},
        {"offer": NUMBER + (1 << 14)},  # its word holds another number: the lease is over
        {"on_demand": 0, "reservation": 3},
        {"private": True},
        {"tokens": None, "insert": False},
        {"num_blocks": 0, "num_tokens": 0, "tiers": b"", "slots": b"", "checksums": b"", "tokens": b""},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_it_does_not_take_leaves_nothing(desk: Desk, changes: dict[str, Any]) -> None:
    assert desk.way.take(desk.offer(**changes)) is None
    assert desk.free() == 6
    assert len(desk.receiver._space.index) == 0


def test_it_leaves_a_full_pool_to_who_can_make_room(desk: Desk, fill: Any) -> None:
    held = desk.receiver.alloc(2)
    assert desk.way.take(desk.offer()) is None
    desk.receiver.free(held)
    assert desk.free() == 6


def test_it_says_what_became_free_to_those_who_wait(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    monkeypatch.setattr(desk.receiver._allocator, "released", heard.append)
    assert desk.way.take(desk.offer(checksums=bytes(40))) is None
    assert heard == [5]


def test_more_tokens_than_blocks_are_cut(desk: Desk) -> None:
    tokens = np.arange(100, dtype=np.int32)
    taken = desk.way.take(desk.offer(num_tokens=100, tokens=tokens.tobytes()))
    assert taken is not None
    assert taken.blocks is not None
    with desk.receiver.match(tokens) as hit:
        assert hit.num_tokens == 20
    desk.receiver.free(Blocks(taken.blocks))


def test_pools_that_tell_others_go_step_by_step(make_pool: MakePool) -> None:
    assert ShortWay.serves(make_pool(4, 4)._space)
    assert not ShortWay.serves(make_pool(4, 4, write="through")._space)
    assert not ShortWay.serves(make_pool(4, 4, quotas=Quotas(each=Quota(hbm="1GiB")))._space)


def test_an_offer_without_a_tag_is_taken_out_of_its_message(desk: Desk) -> None:
    message = encode(desk.offer(tag=b""))
    assert desk.way.take_message(message) is None  # of an identity that was not met yet
    assert desk.way.take(decode(REQUESTS, message)) is not None  # type: ignore[arg-type]
    taken = desk.way.take_message(message)
    assert taken is not None
    assert (taken.blocks, taken.num_pulled, taken.number) == (None, 1, NUMBER)  # a partial block is nobody's history
    assert desk.free() == 2
    desk.receiver.delete(TOKENS)
    taken = desk.way.take_message(message)
    assert taken is not None
    assert (taken.num_pulled, taken.num_calls) == (5, 1)
    assert desk.free() == 2


@pytest.mark.parametrize(
    "change",
    [{"tag": b"t"}, {"insert": False}, {"private": True}, {"growing": True}, {"identity": bytes(16)},
     {"tokens": None}, {"checksums": np.arange(5, dtype=np.uint64).tobytes()}, {"slots": bytes(20)}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_messages_of_other_kinds_leave_nothing(desk: Desk, change: dict[str, Any]) -> None:
    assert desk.way.take(desk.offer(tag=b"")) is not None
    desk.receiver.delete(TOKENS)
    free = desk.free()
    assert desk.way.take_message(encode(desk.offer(**({"tag": b""} | change)))) is None
    assert desk.way.take_message(encode(Cancel(NUMBER, b""))) is None
    assert desk.way.take_message(b"") is None
    assert desk.free() == free
