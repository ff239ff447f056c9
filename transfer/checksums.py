"""Checksums of sealed blocks, made once: a sealed block never changes, and its handle is never used again."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from poolweave.transfer._native import hash_blocks
from poolweave.transfer.regions import OwnMemory
from poolweave.transfer.store import Loan
from poolweave.types import UInt64Array

_MOST_KEPT = 1 << 16


class ChecksumCache:
    """XXH3-64 by handle, least recently used first out. Thread-safe."""

    def __init__(self, memory: OwnMemory, threads: int) -> None:
        self._memory = memory
        self._threads = threads
        self._lock = threading.Lock()
        self._known: OrderedDict[int, int] = OrderedDict()

    def of_loan(self, loan: Loan, num_whole: int) -> UInt64Array:
        """One checksum a block. The first `num_whole` are full blocks and are remembered; a partial one may grow."""
        hashes = np.zeros(len(loan.blocks), np.uint64)
        missing = self._look_up(loan, num_whole, hashes)
        if missing:
            rows = np.asarray(missing)
            fresh = np.empty(len(missing), np.uint64)
            hash_blocks(self._memory.extents(loan.tiers[rows], loan.slots[rows]), 0, self._threads, fresh)
            hashes[rows] = fresh
            self._remember(loan, missing, num_whole, fresh)
        return hashes

    def _look_up(self, loan: Loan, num_whole: int, hashes: UInt64Array) -> list[int]:
        missing = []
        with self._lock:
            for i, handle in enumerate(loan.blocks.tolist()):
                known = self._known.get(handle) if i < num_whole else None
                if known is None:
                    missing.append(i)
                else:
                    hashes[i] = known
                    self._known.move_to_end(handle)
        return missing

    def _remember(self, loan: Loan, rows: list[int], num_whole: int, fresh: UInt64Array) -> None:
        with self._lock:
            for i, value in zip(rows, fresh.tolist(), strict=True):
                if i < num_whole:
                    self._known[int(loan.blocks[i])] = value
            while len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)
