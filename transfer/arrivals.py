"""The receiver's arrivals by tag: announced while they are pulled, then claimed by receive(), or dropped at lease end.

announce --settle--> here --claim--> the caller's          fail: the error waits for its receiver instead
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sortedcontainers import SortedDict

from poolweave.errors import DuplicateTransfer, InstanceClosed, PoolweaveError, TransferFailed, TransferTimeout
from poolweave.transfer.shipment import Arrival

ERROR_KEPT_S = 5.0  # at least, for a receive() that comes later


@dataclass(slots=True, eq=False)
class _Entry:
    tag: bytes
    owner: object  # who announced it: a session and offer number
    deadline: float
    arrival: Arrival | None = None
    error: PoolweaveError | None = None
    serial: int = 0


@dataclass(slots=True, eq=False)
class _Waiter:
    gate: threading.Lock = field(default_factory=threading.Lock)
    entry: _Entry | None = None

    def __post_init__(self) -> None:
        self.gate.acquire()


class ArrivalBook:
    """Thread-safe. Holds the references of arrivals that nobody has claimed; expire() and close() drop them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._waiters: dict[bytes, list[_Waiter]] = {}
        self._deadlines: SortedDict = SortedDict()  # (deadline, serial) -> entry, of settled and failed ones
        self._unwanted: dict[bytes, float] = {}  # until when what comes under this tag is dropped
        self._serial = itertools.count(1)
        self._closed = False
        self.num_expired = 0

    def announce(self, tag: bytes, owner: object, deadline: float) -> None:
        """An offer under `tag` is being pulled. Raises DuplicateTransfer while an earlier one is pulled or kept."""
        with self._lock:
            entry = self._entries.get(tag)
            if entry is not None and entry.error is None:
                state = "waits to be received" if entry.arrival else "is being pulled"
                raise DuplicateTransfer(f"a transfer {tag!r} {state} here; use another tag", tag=tag)
            if entry is not None:
                self._remove(entry)
            self._entries[tag] = _Entry(tag, owner, deadline)

    def extend(self, tag: bytes, owner: object, deadline: float) -> None:
        """What is being pulled is kept until `deadline` once it is there."""
        with self._lock:
            entry = self._find(tag, owner)
            if entry is not None and entry.arrival is None and entry.error is None:
                entry.deadline = deadline

    def settle(
        self, tag: bytes, owner: object, arrival: Arrival, taken_back: Callable[[], bool] = lambda: False
    ) -> bool:
        """The blocks are valid: hand them to who waits, or keep them until the deadline. False when withdrawn.

        `taken_back` is asked under the lock: once it is true, settle() fails or a later withdraw() finds the arrival.
        """
        with self._lock:
            entry = self._find(tag, owner)
            if entry is None or self._closed or entry.error is not None or taken_back():
                return False
            entry.arrival = arrival
            self._deliver(entry)
            unwanted = tag in self._unwanted and entry.serial > 0
            if unwanted:
                self._remove(entry)
        if unwanted:
            arrival.close()
        return True

    def fail(self, tag: bytes, owner: object, error: PoolweaveError) -> None:
        with self._lock:
            entry = self._find(tag, owner)
            if entry is not None and entry.arrival is None and entry.error is None:
                entry.error = copy.copy(error)  # without the traceback, whose frames hold descriptors
                self._deliver(entry)

    def withdraw(self, tag: bytes, owner: object, error: PoolweaveError, *, only_here: bool = False) -> None:
        """The sender took it back: an unclaimed arrival is dropped and replaced by `error`.

        `only_here`: one that is still being pulled is left to its puller, whose fail() comes when its blocks are back.
        """
        with self._lock:
            entry = self._find(tag, owner)
            if entry is None or entry.error is not None or (only_here and entry.arrival is None):
                return
            dropped, entry.arrival, entry.error = entry.arrival, None, error
            if dropped is not None:
                del self._deadlines[entry.deadline, entry.serial]
            self._deliver(entry)
        if dropped is not None:
            dropped.close()

    def claim(self, tag: bytes, timeout: float | None) -> Arrival:
        """Wait for `tag` and take it. Raises what its transfer failed with, TransferTimeout, InstanceClosed."""
        with self._lock:
            if self._closed:
                raise InstanceClosed("the transfer engine is closed")
            entry = self._entries.get(tag)
            if entry is not None and (entry.arrival is not None or entry.error is not None):
                self._remove(entry)
                return _outcome(entry)
            if self._unwanted.get(tag, 0.0) > self._clock():
                raise _unwanted(tag)
            waiter = _Waiter()
            self._waiters.setdefault(tag, []).append(waiter)
        try:
            got = waiter.gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        except BaseException:  # a signal's: nobody will take what comes for this waiter
            self._leave(tag, waiter)
            raise
        if not got:
            with self._lock:
                if waiter.entry is None:  # else it was delivered just after the timeout
                    self._forget(tag, waiter)
                    raise TransferTimeout(
                        f"nothing arrived under {tag!r} within {timeout} s; was it sent, and to this instance?",
                        part=tag,
                        reason="timeout",
                    )
        if waiter.entry is None:
            raise InstanceClosed("the transfer engine was closed while waiting")
        return _outcome(waiter.entry)

    def discard(self, tag: bytes, until: float) -> None:
        """Nobody will claim `tag`: drop what arrived under it, and what arrives before `until`. Does not wait.

        Who waits for it, or asks before `until`, gets TransferFailed.
        """
        with self._lock:
            if self._closed:
                return
            entry = self._entries.get(tag)
            settled = entry is not None and (entry.arrival is not None or entry.error is not None)
            if entry is not None and settled:
                self._remove(entry)
            else:
                self._unwanted[tag] = until
            for waiter in self._waiters.pop(tag, ()):
                waiter.entry = _Entry(tag, None, until, error=_unwanted(tag))
                waiter.gate.release()
        if entry is not None and entry.arrival is not None:
            entry.arrival.close()

    def expire(self, now: float) -> int:
        """Drop what nobody claimed by its deadline; returns how many arrivals were dropped."""
        dropped = []
        with self._lock:
            self._unwanted = {tag: until for tag, until in self._unwanted.items() if until > now}
            while self._deadlines and self._deadlines.peekitem(0)[0][0] <= now:
                entry = self._deadlines.peekitem(0)[1]
                self._remove(entry)
                if entry.arrival is not None:
                    dropped.append(entry.arrival)
            self.num_expired += len(dropped)
        for arrival in dropped:
            arrival.close()
        return len(dropped)

    def next_deadline(self) -> float:
        with self._lock:
            return float(self._deadlines.peekitem(0)[0][0]) if self._deadlines else math.inf

    def close(self) -> None:
        """Drop everything and wake everyone. Idempotent."""
        with self._lock:
            self._closed = True
            entries, self._entries = list(self._entries.values()), {}
            waiters, self._waiters = [w for ws in self._waiters.values() for w in ws], {}
            self._deadlines.clear()
            for waiter in waiters:
                waiter.gate.release()
        for entry in entries:
            if entry.arrival is not None:
                entry.arrival.close()

    @property
    def num_unclaimed(self) -> int:
        with self._lock:
            return sum(entry.arrival is not None for entry in self._entries.values())

    def check(self) -> None:
        """Asserts all invariants."""
        with self._lock:
            settled = [e for e in self._entries.values() if e.arrival is not None or e.error is not None]
            assert {id(e) for e in settled} == {id(e) for e in self._deadlines.values()}, "deadlines and entries differ"
            assert not (set(self._waiters) & {e.tag for e in settled}), "an arrival and its receiver both wait"
            assert all(self._waiters.values()), "an empty list of waiters is left"

    def _leave(self, tag: bytes, waiter: _Waiter) -> None:
        """Stop waiting; an arrival that was delivered already waits for the next receiver instead."""
        with self._lock:
            entry = waiter.entry
            if entry is None:
                if not self._closed:
                    self._forget(tag, waiter)
                return
            if not self._closed and tag not in self._entries:
                self._entries[tag] = entry
                self._deliver(entry)
                return
        if entry.arrival is not None:
            entry.arrival.close()

    def _find(self, tag: bytes, owner: object) -> _Entry | None:
        entry = self._entries.get(tag)
        return entry if entry is not None and entry.owner == owner else None

    def _deliver(self, entry: _Entry) -> None:
        waiters = self._waiters.get(entry.tag)
        if waiters:
            waiter = waiters[0]
            self._forget(entry.tag, waiter)
            del self._entries[entry.tag]
            waiter.entry = entry
            waiter.gate.release()
            return
        if entry.error is not None:  # a lease that ended is why it failed: its receiver shall hear of that
            entry.deadline = max(entry.deadline, self._clock() + ERROR_KEPT_S)
        entry.serial = next(self._serial)
        self._deadlines[entry.deadline, entry.serial] = entry

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry.tag]
        self._deadlines.pop((entry.deadline, entry.serial), None)

    def _forget(self, tag: bytes, waiter: _Waiter) -> None:
        self._waiters[tag].remove(waiter)
        if not self._waiters[tag]:
            del self._waiters[tag]


def _unwanted(tag: bytes) -> TransferFailed:
    return TransferFailed(f"{tag!r} was discarded here: nobody receives it", part=tag, reason="cancelled")


def _outcome(entry: _Entry) -> Arrival:
    if entry.error is not None:
        raise copy.copy(entry.error)
    assert entry.arrival is not None
    return entry.arrival
