"""Who saw what, and when: tokens and prompts as the clients get them, the KV pool as the decode process counts it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from poolweave.serving.generation import Event, Token


@dataclass(frozen=True, slots=True)
class Seen:
    """One token of one request, `at_s` seconds after the start of the run; `asked_s`: of its request."""

    model: str
    session: str
    turn: int
    index: int
    asked_s: float
    at_s: float


@dataclass(frozen=True, slots=True)
class PoolLook:
    """Pages of CrossPool's KV pool that each model has mapped."""

    at_s: float
    pages: dict[str, int]


@dataclass(slots=True)
class Witness:
    """Thread-safe. Times are seconds since construction."""

    tokens: list[Seen] = field(default_factory=list)
    looks: list[PoolLook] = field(default_factory=list)
    budget_pages: int = 0
    _start: float = field(default_factory=time.monotonic)

    def hear(self, model: str) -> Callable[[str, int, Event], None]:
        """What a workload's `on_event` is to be for a model."""

        def event(session: str, turn: int, what: Event) -> None:
            if isinstance(what, Token):
                now = time.monotonic() - self._start
                self.tokens.append(Seen(model, session, turn, what.index, now - what.at_s, now))

        return event

    def watch(self, counters: Callable[[], dict[str, Any]], ending: threading.Event, every_s: float = 0.1) -> None:
        """Look at the pool again and again until `ending`."""
        while not ending.wait(every_s):
            self.look(counters())

    def look(self, figures: dict[str, Any]) -> None:
        """`figures` of the decode engine."""
        pages: dict[str, int] = {}
        for rank in figures["kv"]:
            for model, count in rank["mapped_pages"].items():
                pages[model] = pages.get(model, 0) + count
        self.budget_pages = sum(rank["budget_pages"] for rank in figures["kv"])
        self.looks.append(PoolLook(time.monotonic() - self._start, pages))

    def prompts(self) -> list[Seen]:
        """The first token of each request, in the order in which prompts were computed."""
        return sorted((seen for seen in self.tokens if seen.index == 0), key=lambda seen: seen.at_s)

    def gaps_s(self, model: str) -> list[float]:
        """Seconds between tokens of its answers, after the first: those that CrossPool decoded."""
        own = sorted((s for s in self.tokens if s.model == model), key=lambda s: (s.session, s.turn, s.index))
        pairs = itertools.pairwise(own)
        return [b.at_s - a.at_s for a, b in pairs if b.index > 1 and (a.session, a.turn) == (b.session, b.turn)]
