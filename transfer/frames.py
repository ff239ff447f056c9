"""Frames of the control stream: a checked header, a bounded payload, and a sum over both.

    magic u16 | version u8 | flags u8 | length u32 | sum 16 bytes | payload        little-endian

The header is checked as soon as its eight bytes are there, so nothing is allocated for a length that a peer made up.
The sum covers a counter, the header and the payload: XXH3-128 against corruption, or, where a cluster secret is set, a
keyed BLAKE2b, so that frames cannot be forged, reordered or replayed. Pure: no socket.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

import xxhash

from poolweave.errors import ProtocolError

VERSION = 1
GREETING_LIMIT = 64 << 10  # bytes a peer may send before it has said who it is
FRAME_LIMIT = 32 << 20  # tokens, places and checksums of a prompt of some 5 million tokens
_MAGIC = 0x5750
_HEADER = struct.Struct("<HBBI")
_SIGNED = 1
_SUM_BYTES = 16


def session_keys(secret: bytes, dialer_nonce: bytes, listener_nonce: bytes) -> tuple[bytes, bytes]:
    """The keys of one connection: for frames of the side that dialled, and of the side that listened."""

    def derive(label: bytes) -> bytes:
        return hashlib.blake2b(label + dialer_nonce + listener_nonce, key=greeting_key(secret), digest_size=32).digest()

    return derive(b"dialer"), derive(b"listener")


def greeting_key(secret: bytes) -> bytes:
    """The key of the first frame of each side, before their nonces are known."""
    return hashlib.blake2b(secret, digest_size=32, person=b"poolweave-hello").digest()


class FrameEncoder:
    """Turns payloads into frames; one for each direction of a connection. Not thread-safe."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key
        self._count = 0

    def rekey(self, key: bytes | None) -> None:
        self._key, self._count = key, 0

    def encode(self, payload: bytes) -> bytes:
        """Raises ProtocolError for a payload over FRAME_LIMIT."""
        if len(payload) > FRAME_LIMIT:
            raise ProtocolError(
                f"a message of {len(payload)} bytes exceeds the limit of {FRAME_LIMIT}; send fewer blocks at once",
                nbytes=len(payload),
                limit=FRAME_LIMIT,
            )
        header = _HEADER.pack(_MAGIC, VERSION, 0 if self._key is None else _SIGNED, len(payload))
        total = _sum(self._key, self._count, header, payload)
        self._count += 1
        return header + total + payload


class FrameDecoder:
    """Turns received bytes into payloads, whatever the pieces they come in. Not thread-safe."""

    def __init__(self, limit: int = FRAME_LIMIT, key: bytes | None = None) -> None:
        self._limit = limit
        self._key = key
        self._count = 0
        self._buffer = bytearray()

    def rekey(self, key: bytes | None, limit: int) -> None:
        """From the next frame on; what is buffered already is decoded under the new key and limit."""
        self._key, self._limit, self._count = key, limit, 0

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes | memoryview) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """The next whole payload, or None when more bytes are needed. Raises ProtocolError; then close the stream."""
        buffer = self._buffer
        if len(buffer) < _HEADER.size:
            return None
        magic, version, flags, length = _HEADER.unpack_from(buffer)
        self._check(magic, version, flags, length)
        start = _HEADER.size + _SUM_BYTES
        if len(buffer) < start + length:
            return None
        payload = bytes(memoryview(buffer)[start : start + length])
        total = _sum(self._key, self._count, bytes(buffer[: _HEADER.size]), payload)
        if not hmac.compare_digest(total, buffer[_HEADER.size : start]):
            cause = "a corrupt stream" if self._key is None else "the two instances have different cluster secrets"
            raise ProtocolError(f"the sum of a frame of {length} bytes is wrong: {cause}", nbytes=length)
        self._count += 1
        del buffer[: start + length]
        return payload

    def _check(self, magic: int, version: int, flags: int, length: int) -> None:
        if magic != _MAGIC:
            raise ProtocolError(f"a frame begins with {magic:#06x}: not poolweave's protocol, or a corrupt stream")
        if version != VERSION:
            raise ProtocolError(f"the peer speaks protocol version {version}, this one {VERSION}: upgrade the older")
        if flags not in (0, _SIGNED):
            raise ProtocolError(f"a frame has unknown flags {flags:#04x}")
        if bool(flags & _SIGNED) != (self._key is not None):
            raise ProtocolError("one instance has a cluster secret and the other has none: set `secret` on both")
        if length > self._limit:
            raise ProtocolError(
                f"a frame claims {length} bytes, over the limit of {self._limit}", nbytes=length, limit=self._limit
            )


def _sum(key: bytes | None, count: int, header: bytes, payload: bytes) -> bytes:
    head = count.to_bytes(8, "little") + header
    if key is None:
        return xxhash.xxh3_128_digest(head + payload)
    state = hashlib.blake2b(head, key=key, digest_size=_SUM_BYTES)
    state.update(payload)
    return state.digest()
