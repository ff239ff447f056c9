"""SharedTierMemory: a tier whose pages come on demand out of an arena that others draw on too."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from poolweave.errors import ConfigError, OutOfPages
from poolweave.mempool.arena import Arena
from poolweave.mempool.guests import NUM_WINDOWS, Guests
from poolweave.mempool.tiers import MAX_SLOTS, TierMemory, TierSize
from poolweave.transfer import Joint, KVLayout, Region
from poolweave.types import Int32Array, Tier


class SharedTierMemory(TierMemory):
    """Starts with no page; extend() maps more while the arena has some, shrink() gives them back for others.

    The arena's pages lie scattered, so only pools of the same arena can map this tier: as guests, page by page. Only
    aggregated layouts. Source: CrossPool's virtualizer (ranges that draw on one budget).
    """

    def __init__(self, tier: Tier, layout: KVLayout, size: TierSize, arena: Arena) -> None:
        if layout.order != "aggregated":
            raise ConfigError(
                f"{size.setting}: a tier in a shared arena grows on demand; use order='aggregated'",
                setting="order", value=layout.order,
            )  # fmt: skip
        self.tier = tier
        self.layout = layout
        self._size = size
        self.num_slots = 0
        self.cap_slots = min(size.slots(layout, size.max_bytes), MAX_SLOTS)
        self._arena = arena
        self._block_bytes, self._page_bytes = layout.block_bytes, arena.page_bytes
        # A block lies at the same place of its pages in every pool that sees it: windows begin where row and page do.
        aligned = math.lcm(layout.block_bytes, arena.page_bytes) // layout.block_bytes
        capacity = max(arena.stats().capacity_bytes // layout.block_bytes, self.cap_slots)
        self.window_rows = -(-capacity // aligned) * aligned
        self.max_slots = self.window_rows * (1 + NUM_WINDOWS)
        span = self.window_rows * layout.block_bytes
        self._window_pages = span // arena.page_bytes
        self._range = arena.reserve(span, guests=NUM_WINDOWS * span)
        self.guests: Guests | None = None

    def grow(self, num_slots: int) -> None:
        """Allow up to `num_slots`; they get memory when they are needed."""
        self.cap_slots = num_slots

    def extend(self, num_blocks: int) -> bool:
        have = self._page_end(self.num_slots)
        pages = self._page_end(min(self.num_slots + num_blocks, self.cap_slots))
        while pages > have:
            try:
                self._range.ensure(0, pages)
                break
            except OutOfPages as error:  # take what is left, unless another process was faster
                pages = have + min(error.free, pages - have - 1)
        slots = min(pages * self._arena.page_bytes // self.layout.block_bytes, self.cap_slots)
        grown, self.num_slots = slots > self.num_slots, max(slots, self.num_slots)
        return grown

    def shrink(self, num_slots: int, occupied: npt.NDArray[np.uint32]) -> None:
        self._drop(num_slots, occupied)
        self.num_slots = num_slots

    def region(self) -> Region:
        joint = Joint(self._arena.id, self._arena.member, self._range.table_fd, self.guests)
        return Region(self.tier, -1, self._range.address, self._range.nbytes, self.max_slots, joint)

    # --- pages that several pools read: see guests.py and handed.py -----------------------------------------------

    def take_guests(
        self, member: tuple[int, int, int], rows: Int32Array, windows: int, table: npt.NDArray[np.uint32]
    ) -> bool:
        """Rows that lie `windows` windows behind where `member` has them. False: it is gone, or has them no more."""
        return self._range.take_guests(member, rows, self._block_bytes, windows * self._window_pages, table)

    def num_rows(self, pages: int) -> int:
        """How many blocks lie in a range of so many pages, wholly or in part."""
        return -(-pages * self._page_bytes // self._block_bytes)

    def drop_guests(self, rows: Int32Array) -> None:
        self._range.drop_guests(rows, self._block_bytes)

    def have_guests(self, slots: Int32Array) -> npt.NDArray[np.bool_]:
        """Whether others are guests on pages of each of our own blocks."""
        out = np.empty(len(slots), np.uint8)
        self._range.have_guests(slots, self._block_bytes, out)
        return out.view(bool)

    def departures(self) -> int:
        """How often pages of the arena lost their last guest."""
        return self._arena.departures()

    def reap(self) -> None:
        """Notice processes that died."""
        self._arena.reap()

    def has_orphans(self) -> bool:
        """Whether the arena has pages that only guests keep."""
        return self._arena.stats().orphan_bytes > 0
