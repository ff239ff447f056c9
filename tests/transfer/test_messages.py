"""Messages come back as they went, and nothing that does not add up is accepted."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolweave.errors import ConfigError, DuplicateTransfer, OutOfBlocks, ProtocolError, TransferFailed
from poolweave.transfer import messages
from poolweave.transfer.messages import ANSWERS, GREETINGS, REPLIES, REQUESTS, decode, describe, encode, revive

OFFER = messages.Offer(
    offer=5, nonce=9, lease_s=1.0, tag=b"t", num_blocks=2, num_tokens=20, tiers=bytes(2), slots=bytes(8),
    checksums=bytes(16), identity=bytes(16), tenant=bytes(16), tokens=bytes(80), insert=True, private=False,
    on_demand=1, reservation=0,
)  # fmt: skip


def test_messages_come_back_equal() -> None:
    space = messages.Space(1, 4096, 4, 1024, 256, 64)
    for decoder, message in [
        (GREETINGS, messages.Hello("a", 1, "b", bytes(16), "f", "tcp", "tcp://h:1", (space,))),
        (GREETINGS, messages.DataHello("a", "b", 3, bytes(16))),
        (REPLIES, messages.Welcome("b", 7, bytes(16))),
        (REPLIES, messages.Refused("LayoutMismatch", "no", {"ours": "x", "theirs": None})),
        (REQUESTS, OFFER),
        (REQUESTS, msgspec.structs.replace(OFFER, tenant=b"")),
        (REQUESTS, messages.Ready(5, 1, 0, 2, 3, 4, bytes(16))),
        (REQUESTS, messages.Cancel(5, b"t")),
        (REQUESTS, messages.Reserve(-1, 4, 1, 2.0, bytes(16), b"")),
        (REQUESTS, messages.Unreserve(4)),
        (ANSWERS, messages.Confirm(5, 2, 4096, 1)),
        (ANSWERS, messages.Progress(5, 1, 2)),
        (ANSWERS, messages.Failed(5, "OutOfBlocks", "no", {"needed": 4})),
        (ANSWERS, messages.Reserved(-1, 9)),
    ]:
        assert decode(decoder, encode(message)) == message  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"num_blocks": 3}, {"num_blocks": -1}, {"num_blocks": 1 << 40}, {"num_tokens": 21}, {"num_tokens": -1},
        {"tiers": bytes(3)}, {"slots": bytes(7)}, {"checksums": bytes(8)}, {"identity": bytes(15)}, {"offer": 0},
        {"tenant": bytes(15)}, {"tenant": bytes(17)}, {"tenant": None}, {"tenant": "t" * 16},
        {"lease_s": 0.0}, {"lease_s": float("nan")}, {"lease_s": float("inf")}, {"tag": bytes(1025)},
        {"on_demand": 256},
    ],
)  # fmt: skip
def test_offers_that_do_not_add_up_are_refused(change: dict[str, object]) -> None:
    fields = {name: getattr(OFFER, name) for name in OFFER.__struct_fields__} | change
    raw = msgspec.msgpack.encode(["offer", *fields.values()])
    with pytest.raises(ProtocolError):
        decode(REQUESTS, raw)


@pytest.mark.parametrize(
    "ready",
    [(0, 1, 0, 1, 0, 1), (5, 0, 0, 1, 0, 1), (5, 1, 1, 1, 0, 1), (5, 1, -1, 1, 0, 1), (5, 1, 0, 1, 2, 2),
     (5, 1 << 15, 0, 1, 0, 1), (5, 1, 0, 2, 0, 1), (5, 1, 0, 1, 0, 1 << 21)],
)  # fmt: skip
def test_stretches_that_cannot_be_are_refused(ready: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError):
        decode(REQUESTS, msgspec.msgpack.encode(["ready", *ready, bytes(8)]))


@pytest.mark.parametrize("seat", [(0, 1, 0, 0), (2, 1, 0, 2), (1, 2, 2, 0), (1, 1, -1, 0), (1 << 11, 1, 0, 0)])
def test_shards_that_cannot_be_are_refused(seat: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError):
        decode(REPLIES, msgspec.msgpack.encode(["welcome", "b", 7, bytes(16), seat]))


@given(st.binary(max_size=400))
def test_junk_is_refused(junk: bytes) -> None:
    for decoder in (GREETINGS, REPLIES, REQUESTS, ANSWERS):
        with pytest.raises(ProtocolError):
            decode(decoder, junk)  # type: ignore[arg-type]


@given(st.data())
def test_a_damaged_message_is_refused_or_valid(data: st.DataObject) -> None:
    raw = bytearray(encode(OFFER))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        offer = decode(REQUESTS, bytes(raw))
    except ProtocolError:
        return
    if isinstance(offer, messages.Offer):
        assert len(offer.slots) == 4 * offer.num_blocks
        assert offer.tokens is None or len(offer.tokens) == 4 * offer.num_tokens


def test_errors_cross_with_their_numbers() -> None:
    told = revive(*describe(OutOfBlocks("need 5", needed=5, free=1, evictable=0, pinned=3)), "decode-0")
    assert isinstance(told, OutOfBlocks)
    assert (told.needed, told.free, told.pinned) == (5, 1, 3)
    assert "decode-0" in str(told)
    duplicate = revive(*describe(DuplicateTransfer("twice", tag=b"t")), "d")
    assert isinstance(duplicate, DuplicateTransfer)
    assert duplicate.tag is None  # bytes do not cross
    lost = revive(*describe(TransferFailed("x", part="block 3", reason="checksum")), "d")
    assert (lost.peer, lost.part, lost.reason) == ("d", "block 3", "checksum")
    assert isinstance(revive("ConfigError", "x", {"setting": "y"}, "d"), ConfigError)
    assert type(revive("SystemExit", "x", {}, "d")) is TransferFailed  # only errors of this package, by name
