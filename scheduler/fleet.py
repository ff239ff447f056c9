"""The instances a scheduler sends work to and what each has to do, as arrays over slots. Knows no tree, no policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from poolweave.errors import ConfigError
from poolweave.scheduler._native import CandidateTable
from poolweave.scheduler.slots import SlotArray, Slots
from poolweave.types import Role

Floats: TypeAlias = "npt.NDArray[np.float64]"
Counts: TypeAlias = "npt.NDArray[np.int64]"
TokenCounts: TypeAlias = "npt.NDArray[np.int32]"  # one entry a candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLoad:
    """What one instance has to do, as far as known here."""

    name: str
    role: Role
    accepts: bool
    queued_s: float
    num_prefills: int
    num_sequences: int
    kv_tokens: int


class Fleet:
    """Loads by slot. `queued_s` is the sum of predicted prefill times that an instance has not yet finished: those
    sent from here, and what others sent it as far as it reports."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._roles: dict[int, Role] = {}
        self._accepts: dict[int, bool] = {}
        self._slow: set[int] = set()  # slowness other than 1
        self._groups: dict[tuple[Role, ...], SlotArray] = {}
        self.own_queued_s: list[float] = []
        self.others_s: list[float] = []
        self.num_prefills: list[int] = []
        self._pending_s: Floats = np.zeros(0)  # the sum of the first two, for the hot path
        self.slowness: Floats = np.zeros(0)  # prefill and decode times are multiplied by it
        self.credit: Floats = np.zeros(0)  # share of a prompt tree's match that is believed
        self.num_sequences: Counts = np.zeros(0, np.int64)
        self.kv_tokens: Counts = np.zeros(0, np.int64)
        self.kv_capacity: Counts = np.zeros(0, np.int64)

    def add(self, name: str, role: Role) -> int:
        """A new, empty instance that accepts work. Raises ConfigError when the name is known already."""
        if name in self.slots:
            raise ConfigError(f"instance {name!r} is known already; remove it first", setting="instance", value=name)
        slot = self.slots.add(name)
        self._grow(self.slots.capacity)
        self.own_queued_s[slot] = self.others_s[slot] = self._pending_s[slot] = 0.0
        self.num_prefills[slot] = self.num_sequences[slot] = self.kv_tokens[slot] = 0
        self.credit[slot] = 1.0
        self._roles[slot], self._accepts[slot] = role, True
        self._groups.clear()
        self.describe(name)
        return slot

    def describe(self, name: str, *, slowness: float = 1.0, kv_capacity_tokens: int | None = None) -> None:
        """How fast an instance is, and how much KV it can decode with; None: no limit. Raises UnknownPeer."""
        if slowness <= 0:
            raise ConfigError(f"slowness must be positive, got {slowness}", setting="slowness", value=slowness)
        slot = self.slots.slot(name)
        self.slowness[slot] = slowness
        self.kv_capacity[slot] = np.iinfo(np.int64).max if kv_capacity_tokens is None else kv_capacity_tokens
        (self._slow.discard if slowness == 1.0 else self._slow.add)(slot)

    def remove(self, name: str) -> int | None:
        """Forget an instance; its slot may be given to the next. None when it is not known."""
        slot = self.slots.remove(name)
        if slot is not None:
            del self._roles[slot], self._accepts[slot]
            self._slow.discard(slot)
            self._groups.clear()
        return slot

    def accept(self, name: str, accepts: bool) -> None:
        """Whether new requests go to this instance. Raises UnknownPeer."""
        self._accepts[self.slots.slot(name)] = accepts
        self._groups.clear()

    @property
    def uniform(self) -> bool:
        """Whether all instances are equally fast as the model says."""
        return not self._slow

    def role(self, slot: int) -> Role:
        return self._roles[slot]

    def of(self, *roles: Role) -> SlotArray:
        """Slots of these roles that accept work, ascending."""
        group = self._groups.get(roles)
        if group is None:
            accepting = sorted(s for s, role in self._roles.items() if role in roles and self._accepts[s])
            group = self._groups[roles] = np.array(accepting, np.int64)
        return group

    def candidates(self, slots: SlotArray) -> CandidateTable:
        """`slots` with the seconds of prefill that each has before it; what they hold is not entered yet."""
        return CandidateTable(slots, self._pending_s, self.slowness if self._slow else None)

    def enqueue(self, slot: int, seconds: float) -> None:
        self.num_prefills[slot] += 1
        self.own_queued_s[slot] = queued_s = self.own_queued_s[slot] + seconds
        self._pending_s[slot] = queued_s + self.others_s[slot]

    def dequeue(self, slot: int, seconds: float) -> None:
        self.num_prefills[slot] -= 1
        # Sums of floats drift: an empty queue is exactly empty.
        left = self.own_queued_s[slot] - seconds if self.num_prefills[slot] else 0.0
        self.own_queued_s[slot] = left = left if left > 0.0 else 0.0
        self._pending_s[slot] = left + self.others_s[slot]

    def begin_decode(self, slot: int, kv_tokens: int) -> None:
        self.num_sequences[slot] += 1
        self.kv_tokens[slot] += kv_tokens

    def end_decode(self, slot: int, kv_tokens: int) -> None:
        self.num_sequences[slot] -= 1
        self.kv_tokens[slot] -= kv_tokens

    def report(self, name: str, queued_s: float) -> None:
        """The instance's own account of its queue: what exceeds ours came from other schedulers. Raises UnknownPeer."""
        slot = self.slots.slot(name)
        self.others_s[slot] = max(queued_s - self.own_queued_s[slot], 0.0)
        self._pending_s[slot] = self.own_queued_s[slot] + self.others_s[slot]

    def loads(self) -> tuple[InstanceLoad, ...]:
        """A snapshot of all instances, by slot."""
        return tuple(
            InstanceLoad(
                name=self.slots.name(slot),
                role=role,
                accepts=self._accepts[slot],
                queued_s=float(self._pending_s[slot]),
                num_prefills=self.num_prefills[slot],
                num_sequences=int(self.num_sequences[slot]),
                kv_tokens=int(self.kv_tokens[slot]),
            )
            for slot, role in sorted(self._roles.items())
        )

    def check(self) -> None:
        """Assert all invariants."""
        for load in self.loads():
            assert min(load.queued_s, load.num_prefills, load.num_sequences, load.kv_tokens) >= 0, load
            slot = self.slots.slot(load.name)
            assert load.num_prefills or self.own_queued_s[slot] == 0, load
            total = self.own_queued_s[slot] + self.others_s[slot]
            assert abs(load.queued_s - total) <= 1e-9 * (1 + total), load

    def _grow(self, capacity: int) -> None:
        more = capacity - len(self.num_prefills)
        self.own_queued_s += [0.0] * more
        self.others_s += [0.0] * more
        self.num_prefills += [0] * more
        for name in ("_pending_s", "slowness", "credit", "num_sequences", "kv_tokens", "kv_capacity"):
            setattr(self, name, _grown(getattr(self, name), capacity))


def _grown(array: npt.NDArray[np.generic], capacity: int) -> npt.NDArray[np.generic]:
    if len(array) >= capacity:
        return array
    grown = np.zeros(max(capacity, 2 * len(array)), array.dtype)
    grown[: len(array)] = array
    return grown
