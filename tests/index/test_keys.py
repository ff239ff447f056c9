"""Block keys: one value for one prefix, in every process, from every form of tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array

import numpy as np
import pytest
import xxhash

from poolweave.errors import ConfigError
from poolweave.index import Identity, block_keys
from poolweave.index.keys import short_keys

TOKENS = list(range(1000, 1064))
PROGRAM = """
from poolweave.index import Identity, block_keys
print(block_keys(list(range(1000, 1064)), 16, Identity(model="m", salt=b"s")).tobytes().hex())
"""


def reference(tokens: list[int], block_tokens: int, parent: bytes) -> list[bytes]:
    keys = []
    for i in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = xxhash.xxh3_128_digest(parent + np.array(tokens[i : i + block_tokens], "<i4").tobytes())
        keys.append(parent)
    return keys


@pytest.mark.parametrize("block_tokens", [1, 4, 16, 64])
def test_keys_follow_their_definition(block_tokens: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 2**31, 200, dtype=np.int64).tolist()
    for parent in (bytes(16), bytes(range(16))):
        keys = block_keys(tokens, block_tokens, parent=parent)
        assert [key.tobytes() for key in keys] == reference(tokens, block_tokens, parent)


def test_c14_every_form_of_tokens_has_the_same_keys() -> None:
    expected = block_keys(TOKENS).tolist()
    for form in (tuple(TOKENS), array("i", TOKENS), *(np.array(TOKENS, d) for d in ("<i4", ">i4", "i8", "u4"))):
        assert block_keys(form).tolist() == expected
    assert len(expected) == 4
    assert len(expected[0]) == 16


@pytest.mark.engine
def test_c14_torch_tokens_have_the_same_keys() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.int32, torch.int64):
        assert block_keys(torch.tensor(TOKENS, dtype=dtype)).tolist() == block_keys(TOKENS).tolist()


def test_keys_depend_on_all_before_them_and_on_the_identity() -> None:
    identity = Identity(model="m")
    keys = {key.tobytes() for key in block_keys(TOKENS)} | {key.tobytes() for key in block_keys(TOKENS, 16, identity)}
    keys |= {key.tobytes() for key in block_keys([7, *TOKENS[1:]])}
    assert len(keys) == 12
    chained = block_keys(TOKENS[32:], parent=block_keys(TOKENS, 16, identity)[1].tobytes())
    assert chained.tolist() == block_keys(TOKENS, 16, identity)[2:].tolist()


def test_short_keys_are_the_first_eight_bytes() -> None:
    keys = block_keys(TOKENS)
    assert short_keys(keys).tolist() == [int.from_bytes(key.tobytes()[:8], "big") for key in keys]


def test_less_than_a_block_has_no_key() -> None:
    assert block_keys([1] * 15).shape == (0, 16)
    with pytest.raises(ConfigError, match="16 bytes, got 3"):
        block_keys(TOKENS, parent=b"abc")
    with pytest.raises(ConfigError, match="positive"):
        block_keys(TOKENS, 0)
    with pytest.raises(TypeError):
        block_keys([True] * 16)
    for form in ([-1] * 16, np.full(16, -1, np.int32), np.ones((2, 16), np.int32)):
        with pytest.raises(ValueError):  # noqa: PT011
            block_keys(form)


@pytest.mark.multiproc
def test_c14_every_process_has_the_same_keys() -> None:
    seen = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        for seed in ("0", "1", "random")
    }
    assert seen == {block_keys(TOKENS, 16, Identity(model="m", salt=b"s")).tobytes().hex()}
