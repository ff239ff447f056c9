"""Guests: blocks of this pool whose bytes lie in the pages of other pools of one arena. Nothing of them is copied.

    rows of the view    [ own )[ window 1 )[ window 2 ) ...          a window shows the rows of one lender, in its order
A page that holds a guest is mapped read-only, and neither its owner nor the arena reuses it: the arena's ledger says
who is a guest where, so that also a process that was killed gives back what it held.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from poolweave.mempool._native import BlockTable
from poolweave.types import Int32Array, UInt64Array

if TYPE_CHECKING:
    from poolweave.mempool.shared_tier import SharedTierMemory

GUESTS = BlockTable.GUESTS  # the core's tier number
NUM_WINDOWS = 8
_NONE = np.empty(0, np.uint64)


@dataclass(slots=True, eq=False)
class GuestWindow:
    """One lender's rows as this pool sees them. Thread-safe. `member`, `table`: the lender's registration and pages."""

    guests: Guests
    member: tuple[int, int, int]
    table: npt.NDArray[np.uint32]
    places: dict[int, int] = field(default_factory=dict)  # stretches of the lender's rows to windows of ours
    closed: bool = False

    def borrow(self, slots: Int32Array) -> Int32Array | None:
        """The lender's blocks as rows of ours, readable until give_back(). None: it is gone, or no window is left."""
        return self.guests.take(self, slots)

    def give_back(self, rows: Int32Array) -> None:
        """Borrowed rows are done with."""
        self.guests.drop(rows)

    def adopt(self, slots: Int32Array) -> UInt64Array:
        """Blocks of ours, a reference each, where the lender's lie: for as many as can be, from the first on."""
        rows = self.guests.take(self, slots)
        return self.guests.adopt(rows) if rows is not None else _NONE

    def close(self) -> None:
        """The lender's connection has ended. Blocks stay; the window is another's when the last one has gone."""
        self.closed = True


class Guests:
    """Of one pool, whose HBM tier stands in a shared arena. Thread-safe."""

    def __init__(self, memory: SharedTierMemory, table: BlockTable) -> None:
        self._memory: SharedTierMemory | None = memory
        self._table = table
        self._mutex = threading.Lock()
        self._windows: list[tuple[GuestWindow, int] | None] = []  # window n lies in row n + 1
        self._taken = np.zeros(NUM_WINDOWS + 1, np.int64)  # rows in use, by window

    def open(self, member: tuple[int, int, int], table: npt.NDArray[np.uint32]) -> GuestWindow:
        """For one connection of a lender that stands on the same arena and keeps blocks of the same size."""
        return GuestWindow(self, member, table)

    @property
    def num_blocks(self) -> int:
        return int(self._table.counts(GUESTS).used)

    def take(self, window: GuestWindow, slots: Int32Array) -> Int32Array | None:
        """Map what is not mapped yet. -> rows, one a slot, to be dropped each once; None: none was taken."""
        memory = self._memory
        if memory is None or not len(slots):
            return None
        span = memory.window_rows
        if memory.num_rows(len(window.table)) <= span:  # a slot that the table has not is refused with the others
            return self._take_stretch(window, slots, 0)
        rows, stretches = np.empty(len(slots), np.int32), slots // span
        done: list[Int32Array] = []
        for stretch in np.unique(stretches).tolist():
            chosen = stretches == stretch
            taken = self._take_stretch(window, slots[chosen], stretch)
            if taken is None:
                for part in done:
                    self.drop(part)
                return None
            rows[chosen] = taken
            done.append(taken)
        return rows

    def drop(self, rows: Int32Array) -> None:
        memory = self._memory
        if memory is not None and len(rows):
            memory.drop_guests(rows)
            counts = np.bincount(rows // memory.window_rows, minlength=NUM_WINDOWS + 1)
            with self._mutex:
                self._taken -= counts

    def adopt(self, rows: Int32Array) -> UInt64Array:
        """Make blocks of taken rows, as many as can be from the first on; the other rows are dropped."""
        handles, fresh = np.empty(len(rows), np.uint64), np.zeros(len(rows), np.uint8)
        count = self._table.adopt(rows, handles, fresh)
        if count == len(rows) and fresh.all():
            return handles
        fresh[count:] = 0
        self.drop(rows[fresh == 0])  # a block that was here before has its row
        return handles[:count]

    def settle(self) -> None:
        """Let go of the pages of blocks that went."""
        if self._table.has_departed:
            self.drop(np.array(self._table.take_departed(), np.int32))

    def close(self) -> None:
        """Views keep what they show; with the last one all guests are let go."""
        self._memory = None

    def check(self) -> None:
        self.settle()
        taken = int(self._taken.sum())
        assert taken == self.num_blocks, f"{self.num_blocks} guests in {taken} rows"

    def _take_stretch(self, window: GuestWindow, slots: Int32Array, stretch: int) -> Int32Array | None:
        """As take(), of slots in one stretch of the lender's rows."""
        memory, place = self._memory, self._place(window, stretch)
        if memory is None or place == 0:
            return None
        rows = slots + np.int32((place - stretch) * memory.window_rows)
        if not memory.take_guests(window.member, rows, place - stretch, window.table):
            return None
        with self._mutex:
            self._taken[place] += len(rows)
        return rows

    def _place(self, window: GuestWindow, stretch: int) -> int:
        """The window that shows these rows of the lender; 0 when all are in use."""
        assert self._memory is not None
        with self._mutex:
            if stretch in window.places:
                return window.places[stretch]
            for index, used in enumerate(self._windows):
                if used is None or (used[0].closed and not self._taken[index + 1]):
                    self._windows[index] = window, stretch
                    window.places[stretch] = index + 1
                    return index + 1
            if len(self._windows) == NUM_WINDOWS:
                return 0
            self._windows.append((window, stretch))
            span, count = self._memory.window_rows, len(self._windows)
            self._table.set_guests(span, count * span)
            window.places[stretch] = count
            return count
