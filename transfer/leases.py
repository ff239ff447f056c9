"""The lease table: one word an open offer, in a memfd that peers map read-only.

A word holds its offer's number while the blocks are lent and 0 otherwise. It is cleared before the blocks are given
back, so a reader that finds the number *after* copying knows that what it copied was lent all along.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from poolweave.transfer._native import store_word
from poolweave.types import UInt64Array

SLOT_BITS = 14
NUM_SLOTS = 1 << SLOT_BITS
TABLE_BYTES = 8 * NUM_SLOTS


def slot_of(offer: int) -> int:
    """The word of an offer: the low bits of its number."""
    return offer & (NUM_SLOTS - 1)


class LeaseTable:
    """The words of one engine. Only its owner writes; `fd` is a read-only reopen to hand to peers."""

    def __init__(self) -> None:
        writable = os.memfd_create("poolweave-leases", os.MFD_CLOEXEC)
        try:
            os.ftruncate(writable, TABLE_BYTES)
            self._map = mmap.mmap(writable, TABLE_BYTES)
            self.fd = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(writable)
        self.words: UInt64Array = np.frombuffer(self._map, np.uint64)
        self._read = memoryview(self._map).cast("Q")  # the same words: reading one of an array is slow

    def open(self, offer: int) -> None:
        assert self._read[slot_of(offer)] == 0, "two open offers share a lease word"
        store_word(self.words, slot_of(offer), offer)

    def clear(self, offer: int) -> None:
        """Ends the lease for all readers. Idempotent: a word that another offer holds by now is left alone."""
        if offer > 0 and self._read[slot_of(offer)] == offer:
            store_word(self.words, slot_of(offer), 0)

    def is_open(self, offer: int) -> bool:
        return self._read[slot_of(offer)] == offer

    def num_open(self) -> int:
        return int(np.count_nonzero(self.words))

    def close(self) -> None:
        """Clears all words and gives the descriptor back; the mapping goes with its last reader. Idempotent."""
        if self.fd >= 0:
            for slot in np.flatnonzero(self.words):
                store_word(self.words, int(slot), 0)
            os.close(self.fd)
            self.fd = -1
