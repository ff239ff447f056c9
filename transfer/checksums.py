"""Checksums of sealed blocks, made once: a sealed block never changes, and its handle is never used again."""

from __future__ import annotations

import threading

import numpy as np

from poolweave.transfer.regions import OwnMemory
from poolweave.transfer.store import Loan
from poolweave.types import UInt64Array

_MOST_KEPT = 1 << 16


class ChecksumCache:
    """XXH3-64 by handle, oldest first out. Thread-safe."""

    def __init__(self, memory: OwnMemory, threads: int) -> None:
        self._memory = memory
        self._threads = threads
        self._lock = threading.Lock()
        self._known: dict[int, int] = {}

    def knows(self, loan: Loan, num_whole: int) -> bool:
        """Whether those of the first `num_whole` blocks, which are full, were made before."""
        return all(handle in self._known for handle in loan.blocks[:num_whole].tolist())

    def of_loan(self, loan: Loan, num_whole: int) -> UInt64Array:
        """One checksum a block. The first `num_whole` are full blocks and are remembered; a partial one may grow."""
        handles = loan.blocks.tolist()
        known = self._known
        if num_whole == len(handles):
            try:
                return np.array([known[handle] for handle in handles], np.uint64)  # sent before
            except KeyError:
                pass
        hashes = np.empty(len(handles), np.uint64)
        missing = [i for i, handle in enumerate(handles) if i >= num_whole or handle not in known]
        if len(missing) == len(handles):
            self._memory.hash_blocks(self._memory.extents(loan.tiers, loan.slots), self._threads, hashes)
        else:
            with self._lock:
                found = [known.get(handle, 0) for handle in handles]
            hashes[:] = found
            missing = [i for i, value in enumerate(found) if i >= num_whole or not value]
            self._fill(loan, missing, hashes)
        if missing:
            self._remember(handles, missing, num_whole, hashes)
        return hashes

    def _fill(self, loan: Loan, missing: list[int], hashes: UInt64Array) -> None:
        if missing:
            rows = np.asarray(missing)
            fresh = np.empty(len(missing), np.uint64)
            self._memory.hash_blocks(self._memory.extents(loan.tiers[rows], loan.slots[rows]), self._threads, fresh)
            hashes[rows] = fresh

    def _remember(self, handles: list[int], rows: list[int], num_whole: int, hashes: UInt64Array) -> None:
        values = hashes.tolist()
        with self._lock:
            for i in rows:
                if i < num_whole:
                    self._known[handles[i]] = values[i]
            while len(self._known) > _MOST_KEPT:
                del self._known[next(iter(self._known))]
