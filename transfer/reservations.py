"""Blocks set aside here for peers: they belong to a connection and go back with it, with their lease, or when used."""

from __future__ import annotations

import math
import secrets
import threading
from dataclasses import dataclass

import numpy as np
from sortedcontainers import SortedDict

from poolweave.errors import StaleEpoch
from poolweave.transfer.store import BlockStore, Incoming, Payer
from poolweave.types import Tier, UInt64Array


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    session: object
    number: int
    blocks: UInt64Array
    deadline: float


class ReservationBook:
    """Thread-safe. Holds one reference on each reserved block."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._deadlines: SortedDict = SortedDict()  # (deadline, number) -> entry

    def add(self, session: object, num_blocks: int, tier: Tier, deadline: float, payer: Payer) -> int:
        """Allocate and keep; returns the reservation's number. Raises OutOfBlocks."""
        incoming = Incoming(
            num_blocks=num_blocks, num_tokens=0, identity=payer.identity, tenant=payer.tenant, on_demand=tier
        )
        blocks = self._store.place(incoming).fresh
        entry = _Entry(session, secrets.randbits(62) + 1, blocks, deadline)
        with self._lock:
            self._entries[entry.number] = entry
            self._deadlines[deadline, entry.number] = entry
        return entry.number

    def blocks(self, session: object, number: int) -> UInt64Array:
        """Raises StaleEpoch for a reservation that ended, was used, or belongs to another connection."""
        with self._lock:
            entry = self._entries.get(number)
        if entry is None or entry.session is not session:
            raise StaleEpoch("this reservation is over: it was used, its lease ended, or its connection was lost")
        return entry.blocks

    def use(self, session: object, number: int, num_used: int) -> None:
        """The first `num_used` blocks belong to a placement now; the rest goes back."""
        self._release(self._pop(session, number), num_used)

    def drop(self, session: object, number: int) -> None:
        """Idempotent."""
        self._release(self._pop(session, number), 0)

    def drop_all(self, session: object) -> None:
        with self._lock:
            numbers = [entry.number for entry in self._entries.values() if entry.session is session]
        for number in numbers:
            self.drop(session, number)

    def expire(self, now: float) -> None:
        with self._lock:
            ended = [self._deadlines[key] for key in self._deadlines.irange(maximum=(now, math.inf))]
        for entry in ended:
            self.drop(entry.session, entry.number)

    def next_deadline(self) -> float:
        with self._lock:
            return float(self._deadlines.peekitem(0)[0][0]) if self._deadlines else math.inf

    def close(self) -> None:
        with self._lock:
            entries = list(self._entries.values())
        for entry in entries:
            self.drop(entry.session, entry.number)

    @property
    def num_blocks(self) -> int:
        with self._lock:
            return sum(len(entry.blocks) for entry in self._entries.values())

    def check(self) -> None:
        """Asserts all invariants."""
        with self._lock:
            assert len(self._entries) == len(self._deadlines), "a reservation has no deadline"
            handles = [entry.blocks for entry in self._entries.values()]
            if handles:
                every = np.concatenate(handles)
                assert len(np.unique(every)) == len(every), "a block is reserved twice"

    def _pop(self, session: object, number: int) -> _Entry | None:
        with self._lock:
            entry = self._entries.get(number)
            if entry is None or entry.session is not session:
                return None
            del self._entries[number]
            del self._deadlines[entry.deadline, number]
            return entry

    def _release(self, entry: _Entry | None, skip: int) -> None:
        if entry is not None and len(entry.blocks) > skip:
            self._store.release(entry.blocks[skip:])
