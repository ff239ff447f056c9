"""TierMemory: the bytes of one tier, as slots of a layout in an elastic range. Knows no handles and no references."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from poolweave.errors import ConfigError
from poolweave.mempool._native import Device, TierGeometry
from poolweave.mempool.arena import Arena, ArenaStats
from poolweave.mempool.config import PoolConfig
from poolweave.mempool.device import DeviceArray
from poolweave.mempool.tier_window import TierWindow
from poolweave.transfer import KVLayout, Region
from poolweave.types import Tier

TIERS = (Tier.HBM, Tier.DRAM)  # by the core's tier number: the fastest first
MAX_SLOTS = (1 << 30) - 1


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class TierSize:
    """What a tier starts with and may grow to. Raises ConfigError when that holds no block or exceeds the maximum."""

    setting: str  # "hbm" or "dram"
    nbytes: int
    max_bytes: int
    page_bytes: int
    owner: str = "this machine"
    owner_bytes: int = field(default_factory=_machine_bytes)

    @classmethod
    def of(
        cls, setting: str, nbytes: int, max_bytes: int | None, page_bytes: int, device: Device | None = None
    ) -> TierSize:
        """Of the machine's memory, or of a device's."""
        most = _machine_bytes() if device is None else device.total_bytes
        owner = "this machine" if device is None else f"device cuda:{device.ordinal}"
        if max_bytes is None:
            max_bytes = max(4 * nbytes, most)
        return cls(setting, nbytes, max_bytes, page_bytes, owner, most)

    def slots(self, layout: KVLayout, nbytes: int) -> int:
        """Blocks that fit `nbytes`."""
        if nbytes > self.owner_bytes:
            raise ConfigError(
                f"{self.setting}={nbytes} bytes is more than {self.owner}'s memory of {self.owner_bytes} bytes; ask "
                f"for less, and let max_{self.setting} say what the tier may grow to elsewhere",
                setting=self.setting, value=nbytes, limit=self.owner_bytes,
            )  # fmt: skip
        slots = nbytes // layout.block_bytes
        if slots < 1 or slots > MAX_SLOTS:
            raise ConfigError(
                f"{self.setting}={nbytes} bytes holds {slots} blocks of {layout.block_bytes}: not in [1, {MAX_SLOTS}]",
                setting=self.setting, value=nbytes, limit=layout.block_bytes,
            )  # fmt: skip
        if nbytes > self.max_bytes:
            raise ConfigError(
                f"{self.setting}={nbytes} bytes exceeds max_{self.setting}={self.max_bytes}; make the pool with more",
                setting=self.setting, value=nbytes, limit=self.max_bytes,
            )  # fmt: skip
        return slots


class TierMemory:
    """Slots [0, num_slots) have memory; views span the maximum, so growing never moves them.

    `cap_slots` is what num_slots may become without another resize. Memory is counted in whole pages: the last one may
    reach past the size asked for. A layered tier is static, because each of its planes spans all slots. One caller at a
    time changes it (the pool, under its lock).
    """

    device: Device | None = None  # whose memory it is; None: the host's

    def __init__(
        self, tier: Tier, layout: KVLayout, size: TierSize, config: PoolConfig, device: Device | None = None
    ) -> None:  # fmt: skip
        """`device`: HBM is that GPU's, and what it copies to and from is DRAM."""
        self.tier = tier
        self.device = device if tier is Tier.HBM else None
        self.layout = layout
        self._size = size
        self.num_slots = self.cap_slots = size.slots(layout, size.nbytes)
        static = layout.order == "layered"
        self.max_slots = self.num_slots if static else min(size.max_bytes // layout.block_bytes, MAX_SLOTS)
        span = self.max_slots * layout.block_bytes
        self._arena = Arena(
            self._page_end(self.num_slots) * size.page_bytes, capacity=span, page_bytes=size.page_bytes,
            huge_pages=config.huge_pages, pinned=config.pinned, device=self.device,
            copied_by=device if self.device is None else None,
        )  # fmt: skip
        self._range = self._arena.reserve(span, sole=True)
        self._range.map(0, self._page_end(self.num_slots))

    @property
    def setting(self) -> str:
        return self._size.setting

    def slots_for(self, nbytes: int) -> int:
        """Blocks that fit a new size. Raises ConfigError when it is out of range, or the tier cannot be resized."""
        slots = self._size.slots(self.layout, nbytes)
        if self.layout.order == "layered" and slots != self.num_slots:
            raise ConfigError(
                f"{self.setting} cannot be resized: a layered tier is static; use order='aggregated'",
                setting=self.setting, value=nbytes, limit=self.num_slots,
            )  # fmt: skip
        return slots

    def grow(self, num_slots: int) -> None:
        """Back slots [0, num_slots). Raises what the system says; then nothing changed."""
        pages, page = self._page_end(num_slots), self._arena.page_bytes
        before = self._arena.stats().budget_bytes
        self._arena.set_budget(max(before, (pages + self._range.num_mapped_from(pages)) * page))
        try:
            self._range.ensure(0, pages)
        except BaseException:
            self._arena.set_budget(before)
            raise
        self.num_slots = self.cap_slots = num_slots

    def extend(self, num_blocks: int) -> bool:
        """Back up to `num_blocks` slots more where memory comes on demand. True when there are more now."""
        return False

    def shrink(self, num_slots: int, occupied: npt.NDArray[np.uint32]) -> None:
        """Return the memory of all slots from `num_slots` on but the `occupied` ones (ascending)."""
        self._drop(num_slots, occupied)
        self._arena.set_budget(self._page_end(num_slots) * self._arena.page_bytes)
        self.num_slots = self.cap_slots = num_slots

    def _drop(self, num_slots: int, occupied: npt.NDArray[np.uint32]) -> None:
        page, nbytes = self._arena.page_bytes, self.layout.block_bytes
        first = self._page_end(num_slots)
        for slot in occupied.tolist():
            before = slot * nbytes // page
            if before > first:
                self._range.drop(first, before - first)
            first = max(first, self._page_end(slot + 1))
        self._range.drop(first, self._range.num_pages - first)

    def view(self) -> npt.NDArray[np.generic] | DeviceArray:
        """`[max_slots, layers, parts, block_tokens, heads, dim]` over the range, which it keeps alive; no copy.

        Slots without memory read as zeros, on a device not even that, and must not be written.
        """
        if self.device is not None:
            return DeviceArray(self._range.address, self.device, self.layout, self.max_slots, self._range)
        return self.layout.view(self._range.buffer(), self.max_slots)

    def region(self) -> Region:
        fd = -1 if self.device is not None else self._arena.readonly_fd()
        return Region(self.tier, fd, self._range.address, self._range.nbytes, self.max_slots, device=self.device)

    def window(self) -> TierWindow:
        """The same memory for another process of this instance. Raises ConfigError where its pages lie scattered."""
        if self.device is not None:
            raise ConfigError(
                f"{self.setting} lies on a device, whose memory other processes cannot map; set device='cpu'",
                setting="device",
            )
        if self.layout.order != "aggregated" or not self._range.sole:
            raise ConfigError(
                f"only an aggregated tier with its own arena can be opened by workers; give {self.setting} a size",
                setting=self.setting, value=self.layout.order,
            )  # fmt: skip
        fd, _ = self._arena.descriptors
        return TierWindow(os.getpid(), fd, self._range.nbytes, self.layout.block_bytes, self.layout.plane_bytes)

    def geometry(self) -> TierGeometry:
        """Where planes lie, for the native copy."""
        layout = self.layout
        if layout.order == "layered":
            return TierGeometry(self._range.address, layout.plane_bytes, self.max_slots * layout.plane_bytes)
        return TierGeometry(self._range.address, layout.block_bytes, layout.plane_bytes)  # a block is one run

    @property
    def mapped_bytes(self) -> int:
        return self._range.num_mapped * self._arena.page_bytes

    def stats(self) -> ArenaStats:
        return self._arena.stats()

    def check(self) -> None:
        self._arena.check()
        self._range.check()

    def _page_end(self, num_slots: int) -> int:
        return -(-num_slots * self.layout.block_bytes // self._size.page_bytes)
