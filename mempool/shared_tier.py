"""SharedTierMemory: a tier whose pages come on demand out of an arena that others draw on too."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from poolweave.errors import ConfigError, OutOfPages
from poolweave.mempool.arena import Arena
from poolweave.mempool.tiers import MAX_SLOTS, TierMemory, TierSize
from poolweave.transfer import KVLayout, Region
from poolweave.types import Tier


class SharedTierMemory(TierMemory):
    """Starts with no page; extend() maps more while the arena has some, shrink() gives them back for others.

    The arena's pages lie scattered, so peers cannot map this tier: they pull over a connection. Only aggregated
    layouts. Source: CrossPool's virtualizer (ranges that draw on one budget).
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
        self.cap_slots = self.max_slots = min(size.slots(layout, size.max_bytes), MAX_SLOTS)
        self._arena = arena
        self._range = arena.reserve(self.max_slots * layout.block_bytes)

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
        return Region(self.tier, -1, self._range.address, self._range.nbytes, self.max_slots)
