"""How one of the candidates is chosen: policies as objects. Source: MemServe §6.1, Fig. 15.

A policy sees the instances that may take a prompt, what each holds of it and what each has to do, and returns one.
Equal candidates are drawn by lot: a fixed order would send every scheduler's idle traffic to one instance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import xxhash

from poolweave.scheduler._native import CandidateTable
from poolweave.scheduler._native import draw_lowest as native_draw_lowest
from poolweave.scheduler.fleet import Floats, TokenCounts
from poolweave.scheduler.slots import SlotArray, Slots


class Candidates(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The instances that may take the prompt, never none; arrays over them are views of `table`."""

    slots: SlotArray
    names: Slots
    table: CandidateTable  # draws the lowest without an array
    num_tokens: int
    session: str | None = None

    @property
    def cached_tokens(self) -> TokenCounts:
        """Leading tokens that need not be computed."""
        return self.table.held_tokens

    @property
    def queued_s(self) -> Floats:
        """Work before it."""
        return self.table.queued_s

    @property
    def own_s(self) -> Floats:
        """Predicted time of the prompt itself."""
        return self.table.own_s

    @property
    def uncached_s(self) -> Floats:
        """How unlike they are where nothing is held: predicted times, up to a constant."""
        return self.table.uncached_s


class RoutingPolicy(Protocol):
    """One way of choosing. May keep state; randomness was passed in."""

    def choose(self, candidates: Candidates) -> int:
        """Index into the arrays of `candidates`."""


def draw_lowest(costs: Floats, lot: random.Random) -> int:
    """Index of the lowest cost; one of them by lot where several are lowest, up to a relative 1e-9."""
    return native_draw_lowest(costs, lot.getrandbits(32))


@dataclass(slots=True)
class PromptTreePolicy:
    """argmin of queued + own predicted time: a longer match wins until its queue costs more than it saves.

    A prompt of which nobody holds `min_match` is a miss and goes by load alone. Otherwise a short beginning that all
    prompts share would draw everything to the few that have it, while queues are short, and overrun their caches.
    """

    lot: random.Random
    min_match: float = 0.1

    def choose(self, candidates: Candidates) -> int:
        table, lot = candidates.table, self.lot.getrandbits(32)
        if table.longest < self.min_match * candidates.num_tokens:
            return table.draw_uncached(lot)
        return table.draw_predicted(lot)


@dataclass(slots=True)
class LeastLoad:
    """The shortest queue, whatever it holds."""

    lot: random.Random

    def choose(self, candidates: Candidates) -> int:
        return candidates.table.draw_queued(self.lot.getrandbits(32))


@dataclass(slots=True)
class RoundRobin:
    """Each in turn, by slot."""

    lot: random.Random
    _last: int = field(default=-1, init=False)

    def choose(self, candidates: Candidates) -> int:
        at = int(np.searchsorted(candidates.slots, self._last, side="right")) % len(candidates.slots)
        self._last = int(candidates.slots[at])
        return at


@dataclass(slots=True)
class SessionId:
    """One instance a session, by rendezvous hashing: an instance that goes takes only its own sessions with it.

    Prompts without a session go to the shortest queue.
    """

    lot: random.Random

    def choose(self, candidates: Candidates) -> int:
        if candidates.session is None:
            return candidates.table.draw_queued(self.lot.getrandbits(32))
        session = xxhash.xxh3_64_intdigest(candidates.session.encode())
        names = (candidates.names.name(slot) for slot in candidates.slots.tolist())
        weights = [xxhash.xxh3_64_intdigest(name.encode(), session) for name in names]
        return max(range(len(weights)), key=weights.__getitem__)


@dataclass(slots=True)
class PowerOfTwo:
    """The shorter queue of two drawn by lot: good balance from a stale view, as with several schedulers."""

    lot: random.Random

    def choose(self, candidates: Candidates) -> int:
        count = len(candidates.slots)
        if count == 1:
            return 0
        one, two = self.lot.sample(range(count), 2)
        return one if candidates.queued_s[one] <= candidates.queued_s[two] else two


POLICIES: Mapping[str, Callable[[random.Random], RoutingPolicy]] = {
    "prompt_tree": PromptTreePolicy,
    "least_load": LeastLoad,
    "round_robin": RoundRobin,
    "session": SessionId,
    "power_of_two": PowerOfTwo,
}
