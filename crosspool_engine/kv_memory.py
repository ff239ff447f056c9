"""KV of requests in the arena that the attention worker maps: written there before decoding, read back after.

The host never maps the pages: it writes and reads the arena's file where the worker says the pages lie, split at page
breaks. Only while no batch uses the blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
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

    def write(self, blocks: Sequence[int], rows: npt.NDArray[Any]) -> None:
        """`rows` [len(blocks), layers, parts, block_tokens, heads, dim] into their places."""
        for offset, part in self._parts(blocks, np.ascontiguousarray(rows).reshape(-1).view(np.uint8)):
            os.pwrite(self._fd, part.data, offset)

    def read(self, blocks: Sequence[int]) -> npt.NDArray[Any]:
        """-> a copy, `[len(blocks), layers, parts, block_tokens, heads, dim]`."""
        flat = np.empty(len(blocks) * self.layout.block_bytes, np.uint8)
        for offset, part in self._parts(blocks, flat):
            os.preadv(self._fd, [part.data], offset)
        return self.layout.view(flat, len(blocks))

    def _parts(self, blocks: Sequence[int], flat: npt.NDArray[np.uint8]) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """(offset in the file, bytes of `flat`) for each piece of a block within a page."""
        size, page = self.layout.block_bytes, self._page_bytes
        touched = sorted({p for b in blocks for p in range(b * size // page, ((b + 1) * size - 1) // page + 1)})
        places = dict(zip(touched, self._locate(touched), strict=True))
        for index, block in enumerate(blocks):
            at, end = block * size, (block + 1) * size
            while at < end:
                stop = min(end, (at // page + 1) * page)
                start = index * size + at - block * size
                yield places[at // page] * page + at % page, flat[start : start + stop - at]
                at = stop
