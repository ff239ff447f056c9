"""Arena: physical pages under a byte budget, from which ranges of address space are backed. Knows no blocks."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from multiprocessing.reduction import DupFd
from typing import Any, Literal

from poolweave.errors import ConfigError
from poolweave.mempool import _native
from poolweave.types import parse_bytes

DEFAULT_PAGE_BYTES = 2 << 20
Wanted = Literal["off", "prefer", "require"]
_WANT = {"off": _native.Want.OFF, "prefer": _native.Want.PREFER, "require": _native.Want.REQUIRE}


def wanted(word: str, setting: str) -> _native.Want:
    """The core's word for it. Raises ConfigError."""
    if word not in _WANT:
        raise ConfigError(f"{setting}={word!r} is none of {', '.join(_WANT)}", setting=setting, value=word)
    return _WANT[word]


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """A snapshot, in bytes. `kept`: free pages whose memory stays for reuse. `resident`: what the system has given."""

    page_bytes: int
    capacity_bytes: int
    budget_bytes: int
    held_bytes: int
    kept_bytes: int
    resident_bytes: int
    processes: int
    huge_pages: bool  # obtained
    pinned_bytes: int  # obtained, in this process
    guest_bytes: int  # of the held ones: pages in which others than their owner read
    orphan_bytes: int  # of the held ones: pages whose owner is gone, while others still read in them


class Arena:
    """Pages of one tier: `budget` may be in use now, `capacity` is the most it can be raised to.

    The memory is an anonymous memfd, gone with the last process that has it open, or a GPU's. Thread-safe. Freed pages
    keep their memory for reuse; only shrinking and trim() return it. Raises ConfigError for sizes that cannot be.
    Source: CrossPool's virtualizer (budget and ranges), kvcached (elastic mapping).
    """

    def __init__(
        self, budget: int | str, *, capacity: int | str | None = None, page_bytes: int = DEFAULT_PAGE_BYTES,
        huge_pages: Wanted = "off", pinned: Wanted = "off", device: _native.Device | None = None,
        copied_by: _native.Device | None = None,
    ) -> None:  # fmt: skip
        """`huge_pages` of 2 MiB and `pinned` memory: "require" raises ConfigError where they cannot be had, "prefer"
        takes what there is; stats() tells what was obtained. With a `device` the pages are its own: then they are this
        process's alone, and neither `huge_pages` nor `pinned` says anything. Pinned host memory that a device copies,
        `copied_by`, is registered with it instead of locked.
        """
        budget_bytes = parse_bytes(budget, "budget")
        capacity_bytes = budget_bytes if capacity is None else parse_bytes(capacity, "capacity")
        if device is not None:
            self._native = device.arena(capacity_bytes, budget_bytes, page_bytes)
            return
        create = _native.Arena.create if copied_by is None else copied_by.host_arena
        kind = wanted(huge_pages, "huge_pages"), wanted(pinned, "pinned")
        self._native = create(capacity_bytes, budget_bytes, page_bytes, *kind)

    @classmethod
    def attach(cls, data_fd: int, ledger_fd: int, *, pinned: Wanted = "off") -> Arena:
        """Join the arena of another process by its descriptors, which are duplicated: close yours afterwards."""
        arena = cls.__new__(cls)
        arena._native = _native.Arena.attach(data_fd, ledger_fd, wanted(pinned, "pinned"))
        return arena

    @property
    def descriptors(self) -> tuple[int, int]:
        """What attach() takes in the other process. The arena owns them."""
        return self._native.data_fd, self._native.ledger_fd

    def __reduce__(self) -> Any:
        """Passing an arena to a process that multiprocessing spawns opens it there too."""
        return _attach_passed, tuple(DupFd(fd) for fd in self.descriptors)

    @property
    def page_bytes(self) -> int:
        return self._native.page_bytes

    @property
    def id(self) -> int:
        """Names the arena to all that have joined it: 64 bits, drawn at its creation."""
        return self._native.id

    @property
    def member(self) -> tuple[int, int, int]:
        """This registration as other members name it: (pid, start time of the process, place)."""
        return self._native.member

    def departures(self) -> int:
        """How often a page has lost its last guest."""
        return self._native.departures()

    def reserve(self, nbytes: int | str, *, sole: bool = False, guests: int = 0) -> _native.Range:
        """Address space of `nbytes`, with no memory yet: it reads as zeros, and `range.map(first, count)` backs pages.

        `sole`: the arena's only range; page p of it is page p of the memory, and runs are single kernel mappings.
        Behind it there may be `guests` bytes in which pages of other ranges are mapped, read-only.
        Raises ConfigError when another range is in the way, or vm.max_map_count is too low for scattered pages.
        """
        return _native.Range(self._native, parse_bytes(nbytes, "nbytes"), sole, guests)

    def set_budget(self, budget: int | str) -> None:
        """Grow at once. Shrinking returns free pages; held ones stay until given back, and no new ones come meanwhile.

        Raises ConfigError above the capacity.
        """
        self._native.set_budget(parse_bytes(budget, "budget"))

    def trim(self) -> int:
        """Return the memory of all free pages to the system. -> bytes"""
        return self._native.trim()

    def reap(self) -> int:
        """Free what processes that died held; allocation does so by itself when it runs short. -> bytes"""
        return self._native.reap()

    def readonly_fd(self) -> int:
        """The memory opened read-only, to pass to peers. The arena owns the descriptor."""
        return self._native.readonly_fd()

    def stats(self) -> ArenaStats:
        s = self._native.stats()
        return ArenaStats(**{field.name: getattr(s, field.name) for field in fields(ArenaStats)})

    def check(self) -> None:
        """Raises RuntimeError when an invariant does not hold."""
        self._native.check()


def _attach_passed(data: Any, ledger: Any) -> Arena:
    descriptors = data.detach(), ledger.detach()
    try:
        return Arena.attach(*descriptors)
    finally:
        for fd in descriptors:
            os.close(fd)
