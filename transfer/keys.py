"""The keys that control frames are summed under where there is a cluster secret: the greeting's, then a session's."""

from __future__ import annotations

import hashlib


def session_keys(secret: bytes, dialer_nonce: bytes, listener_nonce: bytes) -> tuple[bytes, bytes]:
    """The keys of one connection: for frames of the side that dialled, and of the side that listened."""

    def derive(label: bytes) -> bytes:
        return hashlib.blake2b(label + dialer_nonce + listener_nonce, key=greeting_key(secret), digest_size=32).digest()

    return derive(b"dialer"), derive(b"listener")


def greeting_key(secret: bytes) -> bytes:
    """The key of the first frame of each side, before their nonces are known."""
    return hashlib.blake2b(secret, digest_size=32, person=b"poolweave-hello").digest()
