"""HandedBook: loans whose blocks others took over as guests. They end when the last guest has left."""

from __future__ import annotations

import threading

import numpy as np

from poolweave.mempool._native import BlockTable
from poolweave.mempool.shared_tier import SharedTierMemory
from poolweave.transfer import Loan
from poolweave.types import Tier


class HandedBook:
    """Of one pool, whose HBM tier stands in a shared arena. Thread-safe.

    A guest is known by the page: of blocks on one page, all that were handed over stay until its last guest has left.
    """

    def __init__(self, table: BlockTable, memory: SharedTierMemory) -> None:
        self._table = table
        self._memory = memory
        self._mutex = threading.Lock()
        self._kept: list[Loan] = []
        self._seen = 0  # departures up to which nothing more can end

    @property
    def num_blocks(self) -> int:
        """Blocks of ours that others hold."""
        with self._mutex:
            return len(np.unique(np.concatenate([loan.blocks for loan in self._kept]))) if self._kept else 0

    def end(self, loan: Loan) -> int:
        """The transfer is over. -> how many blocks became free or evictable; those with guests stay lent."""
        with self._mutex:
            return self._end(loan)

    def collect(self, *, reap: bool = False) -> int:
        """End what guests have left; `reap`: also guests that died. -> how many blocks became free or evictable

        Costs a look at a counter while nobody has left.
        """
        if not self._kept:
            return 0
        if reap:
            self._memory.reap()
        with self._mutex:
            departures = self._memory.departures()
            if departures == self._seen:
                return 0
            kept, self._kept, self._seen = self._kept, [], departures
            return sum(self._end(loan) for loan in kept)

    def _end(self, loan: Loan) -> int:
        if loan.tiers.tobytes().count(Tier.HBM.value) == len(loan.tiers):
            stay = self._memory.have_guests(loan.slots)
            if stay.all():
                self._kept.append(loan)
                return 0
        else:
            here = loan.tiers == Tier.HBM.value
            stay = np.zeros(len(loan.blocks), bool)
            stay[here] = self._memory.have_guests(loan.slots[here])
        if stay.any():
            self._kept.append(Loan(loan.blocks[stay], loan.tiers[stay], loan.slots[stay]))
        gone = ~stay
        return self._table.give_back(loan.blocks[gone], loan.tiers[gone] - np.uint8(1), loan.slots[gone])
