"""BlockSpace: the table, the tiers' memory and the index of one pool, and moves of blocks between tiers.

Lock order: `lock` (composite operations) before the locks inside table and index. Blocks that only the index refers to
lose that state only under `lock`; alloc and free of the callers' own blocks go without it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from poolweave.errors import InstanceClosed
from poolweave.index import RadixIndex
from poolweave.mempool._native import BlockCatalogue, BlockTable, swap_blocks
from poolweave.mempool.guests import GUESTS, Guests
from poolweave.mempool.handed import HandedBook
from poolweave.mempool.quotas import TenantBook
from poolweave.mempool.shared_tier import SharedTierMemory
from poolweave.mempool.stats import TierStats
from poolweave.mempool.tiers import TIERS, TierMemory
from poolweave.transfer import KVLayout
from poolweave.types import Int32Array, Tier, UInt64Array

if TYPE_CHECKING:
    from poolweave.index.events import EventRecorder

HBM, DRAM = 0, 1  # the core's tier numbers
BOTH = Tier.HBM.value | Tier.DRAM.value


@dataclass(slots=True)
class BlockSpace:
    """What a pool is made of. `counters` counts blocks by what happened to them; `recorder` tells others of it."""

    layout: KVLayout
    table: BlockTable
    tiers: dict[int, TierMemory]  # by tier number
    index: RadixIndex
    copy_threads: int
    tenants: TenantBook | None = None  # where quotas are set
    on_sealed: Callable[[UInt64Array], None] | None = None  # told of sealed blocks
    lock: threading.RLock = field(default_factory=threading.RLock)
    counters: Counter[str] = field(default_factory=Counter)
    recorder: EventRecorder | None = None
    guests: Guests | None = None  # where HBM stands in a shared arena
    handed: HandedBook | None = None
    catalogue: BlockCatalogue = field(init=False)  # table and index in step; use it under `lock`

    def __post_init__(self) -> None:
        self.catalogue = BlockCatalogue(self.table, self.index.tree)

    @property
    def guest_row(self) -> int:
        """Rows of HBM from here on are guests'."""
        memory = self.tiers[HBM]
        return memory.window_rows if isinstance(memory, SharedTierMemory) else memory.max_slots

    @property
    def has_dram(self) -> bool:
        return DRAM in self.tiers

    def locate(self, handles: UInt64Array) -> tuple[npt.NDArray[np.uint8], Int32Array]:
        """Tier values and slots, one a block. Raises UnknownBlock, StaleHandle."""
        tiers, slots = np.empty(len(handles), np.uint8), np.empty(len(handles), np.int32)
        self.table.locate(handles, tiers, slots)
        return tiers + np.uint8(1), slots

    def move(self, handles: UInt64Array, target: int) -> bool:
        """Copy blocks to tier number `target` and let them lie there; handles stay. False when it has too little room.

        The caller holds `lock`. The copy releases the GIL; on an error nothing has moved.
        """
        if not len(handles):
            return True
        tiers = np.empty(len(handles), np.uint8)
        slots, to = np.empty((2, len(handles)), np.int32)
        if not self.table.begin_move(handles, target, tiers, slots, to):
            return False
        try:
            for source in np.unique(tiers).tolist():
                chosen = tiers == source
                self.copy(source, target, slots[chosen], to[chosen])
        except BaseException:
            self.table.abort_move(handles, target, to)
            raise
        self.table.commit_move(handles, target, to)
        if self.recorder is not None:
            self.recorder.moved(handles, TIERS[target])
        return True

    def demote_mirrored(self, handles: UInt64Array) -> UInt64Array:
        """Let those that were written through lie in DRAM. -> the others. The caller holds `lock`."""
        rest = np.array(self.table.demote_mirrored(handles), np.uint64)
        if self.recorder is not None and len(rest) < len(handles):
            self.recorder.moved(np.setdiff1d(handles, rest), TIERS[DRAM])
        return rest

    def seal(self, handles: UInt64Array) -> None:
        """Their KV is written. Raises UnknownBlock, StaleHandle."""
        self.table.seal(handles)
        if self.on_sealed is not None:
            self.on_sealed(handles)

    def copy(self, source: int, target: int, slots: Int32Array, to: Int32Array) -> None:
        """The bytes of rows `slots` of one tier into rows `to` of another, without the GIL."""
        layout = self.layout
        one, other = self.tiers[source], self.tiers[target]
        device = one.device or other.device
        if device is None:
            planes = layout.num_planes, layout.plane_bytes
            swap_blocks(one.geometry(), other.geometry(), slots, to, *planes, self.copy_threads)
            return
        device.swap_blocks(one.geometry(), other.geometry(), slots, to, layout.num_planes, layout.plane_bytes)

    def drop(self, handles: UInt64Array, reason: str) -> int:
        """The index gave these up: drop its references. -> how many blocks became free by it"""
        freed = self.table.unindex(handles)
        if self.guests is not None:
            self.guests.settle()
        if self.recorder is not None:
            self.recorder.removed(handles)
        self.counters[reason] += len(handles)
        return freed

    def tier_stats(self, number: int) -> TierStats:
        """A snapshot of one tier. The caller holds `lock`."""
        memory = self.tiers[number]
        c: Any = self.table.counts(number)
        return TierStats(
            tier=memory.tier, total=c.limit, free=c.free, historical=c.historical, pinned=c.pinned,
            active=c.used - c.historical - c.limbo - c.reserved - c.mirrors, leased=c.leased, limbo=c.limbo,
            overhang=c.overhang, mirrors=c.mirrors,
            guests=self.guests.num_blocks if self.guests is not None and number == HBM else 0,
            handed=self.handed.num_blocks if self.handed is not None and number == HBM else 0,
            largest_run=self.table.longest_free_run(number), mapped_bytes=memory.mapped_bytes, memory=memory.stats(),
        )  # fmt: skip

    def close(self) -> None:
        """From now on every use of the table raises InstanceClosed. Views keep the memory they show."""
        with self.lock:
            if self.guests is not None:
                self.guests.close()
            self.guests = self.handed = None
            self.table = cast(BlockTable, _Closed())
            self.tiers = cast(dict[int, TierMemory], _Closed())
            self.catalogue = cast(BlockCatalogue, _Closed())
            if self.recorder is not None:
                self.recorder.publisher.close()

    def check(self) -> None:
        """Raises when an invariant of the parts, or between them, does not hold. Call it while no operation runs."""
        with self.lock:
            if self.handed is not None:
                self.handed.collect(reap=True)
            if self.guests is not None:
                self.guests.check()
            self.table.check()
            self.index.check()
            for memory in self.tiers.values():
                memory.check()
            counts = [self.table.counts(number) for number in (*range(len(TIERS)), GUESTS)]
            indexed = sum(c.historical + c.pinned for c in counts)
            assert self.recorder is None or len(self.recorder) == indexed, "the recorder told of other blocks"
            assert indexed == len(self.index), f"{indexed} blocks are marked indexed, the index holds {len(self.index)}"


class _Closed:
    """Stands for the parts of a closed pool: any use says so."""

    def __getattr__(self, name: str) -> Any:
        raise InstanceClosed("this pool was closed before")

    def __iter__(self) -> Any:
        raise InstanceClosed("this pool was closed before")

    __contains__ = __getitem__ = __getattr__
