"""The frame decoder: any cut of good bytes gives the same payloads, and no bad bytes give a payload."""

from __future__ import annotations

import contextlib
import hashlib

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from poolweave.errors import ProtocolError
from poolweave.transfer._native import FRAME_LIMIT, FrameDecoder, FrameEncoder
from poolweave.transfer.keys import greeting_key, session_keys

KEYS = st.sampled_from([None, b"k" * 32])
HEADER, CHECKED, HEAD = 8, 12, 28  # bytes: what the check covers, with the check, with the sum


def frames_of(payloads: list[bytes], key: bytes | None) -> bytes:
    encoder = FrameEncoder(key)
    return b"".join(encoder.encode(payload) for payload in payloads)


def drain(decoder: FrameDecoder) -> list[bytes]:
    return list(iter(decoder.next, None))


@given(st.lists(st.binary(max_size=300), max_size=6), KEYS, st.data())
def test_frames_survive_any_cut(payloads: list[bytes], key: bytes | None, data: st.DataObject) -> None:
    stream = frames_of(payloads, key)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder, got = FrameDecoder(key=key), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        decoder.feed(stream[start:end])
        got += drain(decoder)
    assert got == payloads
    assert decoder.buffered == 0


@given(st.binary(max_size=2000), st.integers(1, 3), KEYS)
def test_sums_are_those_of_the_protocol(payload: bytes, count: int, key: bytes | None) -> None:
    """Made here from the published algorithms: what other implementations compute."""
    encoder = FrameEncoder(key)
    for _ in range(count):
        frame = encoder.encode(payload)
    head = (count - 1).to_bytes(8, "little") + frame[:HEADER]
    total = (
        xxhash.xxh3_128_digest(head + payload)
        if key is None
        else hashlib.blake2b(head + payload, key=key, digest_size=16).digest()
    )
    assert frame[HEADER:CHECKED] == xxhash.xxh3_64_intdigest(frame[:HEADER]).to_bytes(8, "little")[:4]
    assert frame[CHECKED:] == total + payload


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=3), KEYS, st.data())
def test_no_changed_bit_goes_unnoticed(payloads: list[bytes], key: bytes | None, data: st.DataObject) -> None:
    stream = bytearray(frames_of(payloads, key))
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at] ^= 1 << data.draw(st.integers(0, 7))
    decoder = FrameDecoder(limit=1000, key=key)
    decoder.feed(bytes(stream))
    got: list[bytes] = []
    with contextlib.suppress(ProtocolError):
        got.extend(iter(decoder.next, None))
    assert got == payloads[: len(got)]
    assert len(got) < len(payloads)


@given(st.binary(min_size=8, max_size=200), KEYS)
def test_junk_is_refused_or_waits_for_more(junk: bytes, key: bytes | None) -> None:
    decoder = FrameDecoder(limit=1000, key=key)
    decoder.feed(junk)
    try:
        assert decoder.next() is None
    except ProtocolError:
        return
    assert len(junk) < CHECKED  # a header of the right magic and version at most: the check is there by then


def test_a_length_over_the_limit_is_refused_at_its_header() -> None:
    decoder = FrameDecoder(limit=100)
    decoder.feed(FrameEncoder().encode(bytes(101))[:CHECKED])
    with pytest.raises(ProtocolError) as caught:
        decoder.next()
    assert (caught.value.nbytes, caught.value.limit) == (101, 100)
    with pytest.raises(ProtocolError, match="fewer blocks"):
        FrameEncoder().encode(bytes(FRAME_LIMIT + 1))


@given(st.binary(max_size=300), KEYS, st.integers(0, 8 * CHECKED - 1))
def test_a_damaged_header_is_refused_before_its_payload_comes(payload: bytes, key: bytes | None, bit: int) -> None:
    """A length that grew would else swallow all that follows, until somebody's lease ends."""
    head = bytearray(FrameEncoder(key).encode(payload)[:CHECKED])
    head[bit // 8] ^= 1 << bit % 8
    decoder = FrameDecoder(key=key)
    decoder.feed(bytes(head))
    with pytest.raises(ProtocolError):
        decoder.next()


def test_frames_cannot_be_replayed_or_reordered() -> None:
    encoder = FrameEncoder(b"k" * 32)
    first, second = encoder.encode(b"1"), encoder.encode(b"2")
    for stream in (first + first, second):
        decoder = FrameDecoder(key=b"k" * 32)
        decoder.feed(stream)
        with pytest.raises(ProtocolError):
            drain(decoder)


@pytest.mark.parametrize(("ours", "theirs"), [(None, b"k" * 32), (b"k" * 32, None), (b"k" * 32, b"x" * 32)])
def test_secrets_must_agree(ours: bytes | None, theirs: bytes | None) -> None:
    decoder = FrameDecoder(key=ours)
    decoder.feed(FrameEncoder(theirs).encode(b"hello"))
    with pytest.raises(ProtocolError, match="secret"):
        decoder.next()


def test_session_keys_differ_by_direction_and_by_connection() -> None:
    keys = {*session_keys(b"s" * 16, b"1", b"2"), *session_keys(b"s" * 16, b"1", b"3"), greeting_key(b"s" * 16)}
    assert len(keys) == 5
