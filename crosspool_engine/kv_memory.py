"""KV of requests in the arena that the attention worker maps: written there before decoding, read back after.

The host never maps the pages: it writes and reads the arena's file where the worker says the pages lie, split at page
breaks. Only while no batch uses the blocks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from poolweave.transfer.layout import KVLayout

Locate = Callable[[Sequence[int]], Sequence[int]]  # pages of a range -> pages of the arena


class KvMemory:
    """One model's blocks in the arena's file. `locate` asks the worker."""

    def __init__(self, layout: KVLayout, data_fd: int, page_bytes: int, locate: Locate) -> None:
        self.layout = layout
        self._fd = data_fd
        self._page_bytes = page_bytes
        self._locate = locate

    def write(self, blocks: Sequence[int], rows: Iterable[npt.NDArray[Any]]) -> None:
        """A row for each of `blocks`, `[layers, parts, block_tokens, heads, dim]` in one run, into their places."""
        pieces = self._pieces(blocks)
        for row, places in zip(rows, pieces, strict=True):
            flat = row.reshape(-1).view(np.uint8)
            for offset, begin, end in places:
                os.pwrite(self._fd, flat[begin:end].data, offset)

    def read(self, blocks: Sequence[int]) -> npt.NDArray[Any]:
        """-> a copy, `[len(blocks), layers, parts, block_tokens, heads, dim]`."""
        flat = np.empty(len(blocks) * self.layout.block_bytes, np.uint8)
        for row, places in zip(flat.reshape(len(blocks), self.layout.block_bytes), self._pieces(blocks), strict=True):
            for offset, begin, end in places:
                os.preadv(self._fd, [row[begin:end].data], offset)
        return self.layout.view(flat, len(blocks))

    def _pieces(self, blocks: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
        """For each block its pieces within pages: (offset in the file, first and last byte of the block)."""
        size, page = self.layout.block_bytes, self._page_bytes
        touched = sorted({p for b in blocks for p in range(b * size // page, ((b + 1) * size - 1) // page + 1)})
        places = dict(zip(touched, self._locate(touched), strict=True))
        for block in blocks:
            first, end = block * size, (block + 1) * size
            breaks = [first, *range((first // page + 1) * page, end, page), end]
            yield [
                (places[at // page] * page + at % page, at - first, stop - first)
                for at, stop in itertools.pairwise(breaks)
            ]
