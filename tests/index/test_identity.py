"""Identities and their namespaces: equal ones share, unlike ones never do, salts stay inside."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from poolweave.errors import ConfigError
from poolweave.index import Identity, RadixIndex

FULL = Identity(
    model="m", revision="r", layout="l", dtype="d", adapter="a", multimodal=(b"image",), salt=b"very secret salt"
)


def test_every_field_makes_another_identity() -> None:
    others = [
        Identity(**{**{f: getattr(FULL, f) for f in Identity.__slots__}, field: value})
        for field, value in {
            "model": "M", "revision": "R", "layout": "L", "dtype": "D", "adapter": "A",
            "multimodal": (b"other",), "salt": b"other",
        }.items()
    ]  # fmt: skip
    assert len({identity.digest for identity in [FULL, Identity(), *others]}) == 9


def test_fields_cannot_be_moved_into_one_another() -> None:
    framings = [
        Identity(model="ab"),
        Identity(model="a", revision="b"),
        Identity(model="a", revision="", layout="b"),
        Identity(multimodal=(b"ab",)),
        Identity(multimodal=(b"a", b"b")),
        Identity(multimodal=(b"ab", b"")),
        Identity(multimodal=(b"a",), salt=b"b"),
        Identity(salt=b"ab"),
        Identity(model="\x02\x00\x00\x00\x00\x00\x00\x00ab"),
    ]
    for a, b in itertools.combinations(framings, 2):
        assert a.digest != b.digest, (a, b)


def test_digests_are_the_same_everywhere() -> None:
    assert FULL.digest.hex() == "7664595631c7a2c32d7b01a58e2902a2"
    assert len(Identity().digest) == 16


def test_a_salt_is_never_shown() -> None:
    index = RadixIndex(max_tenant_bytes="64 KiB")
    index.namespace(FULL)
    for text in (repr(FULL), str(FULL), repr(vars(index._namespaces)), repr(FULL.digest)):
        assert "secret" not in text


def test_another_identity_never_hits() -> None:
    index = RadixIndex()
    mine, theirs = index.namespace(FULL), index.namespace(Identity(model="m"))
    assert len({0, mine, theirs}) == 3
    tokens = np.arange(64, dtype=np.int32)
    index.insert(tokens, [1, 2, 3, 4], mine)
    assert index.match(tokens, theirs).num_tokens == index.match(tokens).num_tokens == 0
    assert index.match(tokens, index.namespace_of(FULL.digest)).num_tokens == 64


def test_a_digest_has_sixteen_bytes() -> None:
    with pytest.raises(ConfigError, match="16 bytes, got 3"):
        RadixIndex().namespace_of(b"abc")


def test_threads_intern_one_namespace() -> None:
    index = RadixIndex()
    seen: list[list[int]] = []

    def intern() -> None:
        seen.append([index.namespace(Identity(model=str(i))) for i in range(300)])

    threads = [threading.Thread(target=intern) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(row == seen[0] for row in seen)
    assert len(set(seen[0])) == 300
