"""Instance names as small numbers, so that loads and scores are arrays. Knows no tree and no load."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from poolweave.errors import ConfigError, UnknownPeer

MAX_INSTANCES = 65_536

SlotArray: TypeAlias = "npt.NDArray[np.int64]"


class Slots:
    """Names <-> slots; the lowest free slot is given first, so arrays over slots stay short.

    Whoever removes a name has made sure that nothing about the old holder of its slot is kept.
    """

    def __init__(self) -> None:
        self._slot_of: dict[str, int] = {}
        self._names: list[str | None] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, name: str) -> bool:
        return name in self._slot_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._slot_of)

    @property
    def names(self) -> Sequence[str | None]:
        """The name on each slot, None where it is free; a view, not a copy."""
        return self._names

    @property
    def capacity(self) -> int:
        """One more than the highest slot ever given: the length of arrays over slots."""
        return len(self._names)

    def add(self, name: str) -> int:
        """The slot of `name`, given now if it had none. Raises ConfigError beyond 65,536 instances."""
        slot = self._slot_of.get(name)
        if slot is not None:
            return slot
        if self._free:
            slot = heapq.heappop(self._free)
            self._names[slot] = name
        else:
            slot = len(self._names)
            if slot >= MAX_INSTANCES:
                raise ConfigError(
                    f"at most {MAX_INSTANCES} instances can be known at once; drop dead ones",
                    setting="instances",
                    value=slot + 1,
                    limit=MAX_INSTANCES,
                )
            self._names.append(name)
        self._slot_of[name] = slot
        return slot

    def remove(self, name: str) -> int | None:
        """Free the slot of `name` and return it; None when it had none."""
        slot = self._slot_of.pop(name, None)
        if slot is not None:
            self._names[slot] = None
            heapq.heappush(self._free, slot)
        return slot

    def get(self, name: str) -> int | None:
        """The slot of `name`, or None."""
        return self._slot_of.get(name)

    def slot(self, name: str) -> int:
        """The slot of `name`. Raises UnknownPeer."""
        slot = self._slot_of.get(name)
        if slot is None:
            raise UnknownPeer(f"instance {name!r} is not known here; {len(self)} others are", peer=name)
        return slot

    def name(self, slot: int) -> str:
        """The name that holds `slot`. Raises UnknownPeer for a free one."""
        name = self._names[slot] if 0 <= slot < len(self._names) else None
        if name is None:
            raise UnknownPeer(f"no instance holds slot {slot} of {self.capacity}", peer=None)
        return name
