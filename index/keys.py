"""Chained 128-bit names of a prompt's blocks, for everything outside the process. Knows no tree.

Inside, prefixes are compared token by token; a key is what files, events and other machines know a prefix by.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from poolweave.index._native import chained_keys
from poolweave.index.identity import Identity
from poolweave.types import TokenIds, UInt64Array, as_tokens

BlockKeys: TypeAlias = "npt.NDArray[np.uint8]"  # [num_blocks, 16]

NO_PARENT = bytes(16)
_INT32 = np.dtype(np.int32)


def block_keys(
    tokens: TokenIds, block_tokens: int = 16, identity: Identity | None = None, *, parent: bytes | None = None
) -> BlockKeys:
    """One 16-byte key a whole block, each standing for all tokens up to its block's end under `identity`.

    key[i] = XXH3-128(key[i - 1] | tokens of block i as little-endian int32), canonical form; the key before the first
    is `parent`, else the identity's digest, else zeros. The same in every process and on every platform, from every
    form of tokens. Cost about 17 ns a block. Raises TypeError and ValueError as `as_tokens` does.
    """
    if not (isinstance(tokens, np.ndarray) and tokens.dtype is _INT32):
        tokens = as_tokens(tokens)
    if parent is None:
        parent = NO_PARENT if identity is None else identity.digest
    return chained_keys(tokens, block_tokens, parent)


def short_keys(keys: BlockKeys) -> UInt64Array:
    """The first 8 bytes of each key as an integer: the block hashes of KV events."""
    return np.ascontiguousarray(keys[:, :8]).view(">u8").astype(np.uint64).reshape(-1)
