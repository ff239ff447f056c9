"""A growing transfer while it comes, as its receiver sees it: blocks to read layer by layer before all is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from poolweave.types import Int32Array, UInt64Array

if TYPE_CHECKING:
    from poolweave.transfer.assembler import Assembler
    from poolweave.transfer.assembly import Assembly


class Arriving:
    """`blocks` in token order: matched ones, then those being filled. Owns nothing: who reads them beyond the end of
    the transfer keeps references of their own; receive() hands over the whole. Thread-safe.
    """

    def __init__(self, assembler: Assembler, assembly: Assembly) -> None:
        self._assembler = assembler
        self._assembly = assembly
        self.blocks: UInt64Array = assembly.blocks
        self.num_tokens = assembly.offer.num_tokens

    @property
    def tokens(self) -> Int32Array | None:
        """None when the sender named none."""
        tokens = self._assembly.offer.tokens
        return np.frombuffer(tokens, np.int32) if tokens is not None else None

    @property
    def layers(self) -> int:
        """Leading layers that all blocks have by now."""
        return self._assembly.layers_here(len(self.blocks))

    def wait(self, layers: int, num_blocks: int | None = None, timeout: float | None = None) -> None:
        """Until the first `layers` layers of the first `num_blocks` blocks (None: all) are here and checked.

        Raises what the transfer failed with, or TransferTimeout after `timeout` seconds.
        """
        count = len(self.blocks) if num_blocks is None else min(num_blocks, len(self.blocks))
        self._assembler.wait(self._assembly, layers, count, timeout)
