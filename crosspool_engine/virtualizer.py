"""KV blocks of several models under one page budget: who has which blocks, and which pages must be mapped for them.

Pure bookkeeping: it says what to map and unmap, the attention worker does it (a page is mapped by the process that
reads it) and the host waits before a batch may use the blocks. Source: CrossPool virtualizer: a virtual range a model,
pages on demand, off the per-token path; active pages are never taken.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from poolweave.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages [first, first + count) of one model's range."""

    model: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Blocks for one request, and what to do first: `unmap`, then `map`, in this order."""

    model: str
    blocks: tuple[int, ...]
    unmap: tuple[PageRun, ...]
    map: tuple[PageRun, ...]


@dataclass(frozen=True, slots=True)
class VirtualizerStats:
    """Pages under the budget, by model: mapped, and needed by blocks in use."""

    budget_pages: int
    mapped_pages: dict[str, int]
    used_pages: dict[str, int]
    used_blocks: dict[str, int]


@dataclass(slots=True)
class _Range:
    """One model's range. A page is mapped or not; `users` counts the blocks in use that touch it."""

    block_bytes: int
    max_blocks: int
    free: list[int] = field(default_factory=list)  # a heap: the lowest block first, so that tails come free
    next_block: int = 0  # blocks from here on were never given
    mapped: set[int] = field(default_factory=set)
    users: Counter[int] = field(default_factory=Counter)
    used: set[int] = field(default_factory=set)

    @property
    def num_free(self) -> int:
        return len(self.free) + self.max_blocks - self.next_block

    @property
    def idle(self) -> set[int]:
        """Mapped pages that no block in use touches."""
        return {page for page in self.mapped if not self.users[page]}

    def peek(self, count: int) -> list[int]:
        """The `count` lowest free blocks, without taking them."""
        lowest = heapq.nsmallest(count, self.free)
        return lowest + list(range(self.next_block, self.next_block + count - len(lowest)))

    def take(self, blocks: list[int]) -> None:
        for block in blocks:
            if block >= self.next_block:
                self.next_block = block + 1
            else:
                heapq.heappop(self.free)
        self.used |= set(blocks)

    def give(self, blocks: tuple[int, ...]) -> None:
        self.used -= set(blocks)
        for block in blocks:
            heapq.heappush(self.free, block)

    def pages(self, block: int, page_bytes: int) -> range:
        first = block * self.block_bytes
        return range(first // page_bytes, (first + self.block_bytes - 1) // page_bytes + 1)


class Virtualizer:
    """Gives out blocks while their pages fit `budget_pages`, all models together. Not thread-safe: the host's.

    After a release at most one idle page a model stays mapped, so that what is resident follows the demand within one
    page a model; `grant` takes those first when it is short.
    """

    def __init__(self, budget_pages: int, page_bytes: int) -> None:
        if budget_pages < 1 or page_bytes < 1:
            raise ConfigError(f"a budget has pages, got {budget_pages}", setting="kv_budget", value=budget_pages)
        self.budget_pages = budget_pages
        self.page_bytes = page_bytes
        self._ranges: dict[str, _Range] = {}

    def add(self, model: str, *, block_bytes: int, max_blocks: int) -> None:
        """Open a range of `max_blocks` blocks. Costs no page."""
        if model in self._ranges or block_bytes < 1 or max_blocks < 1:
            raise ConfigError(f"model {model!r} is here already or has no blocks", setting="model", value=model)
        self._ranges[model] = _Range(block_bytes, max_blocks)

    def remove(self, model: str) -> tuple[PageRun, ...]:
        """Close a range with no block in use. -> the pages to unmap. Raises ConfigError while blocks are in use."""
        used = len(self._ranges[model].used)
        if used:
            raise ConfigError(f"{used} blocks of {model!r} are in use", setting="model", value=model)
        return tuple(_runs(model, self._ranges.pop(model).mapped))

    def can_ever(self, model: str, num_blocks: int) -> bool:
        """Whether so many blocks of a request would fit if nothing else were there."""
        span = self._ranges[model]
        last = num_blocks * span.block_bytes
        return num_blocks <= span.max_blocks and -(-last // self.page_bytes) <= self.budget_pages

    def grant(self, model: str, num_blocks: int) -> Grant | None:
        """The lowest free blocks, all or None where blocks or pages are short; nothing in use is ever taken."""
        span = self._ranges[model]
        if num_blocks > span.num_free:
            return None
        blocks = span.peek(num_blocks)
        touched = {page for block in blocks for page in span.pages(block, self.page_bytes)}
        fresh = touched - span.mapped
        victims = self._victims(len(fresh) + self.num_mapped - self.budget_pages, model, touched)
        if victims is None:
            return None
        span.take(blocks)
        span.mapped |= fresh
        for block in blocks:
            span.users.update(span.pages(block, self.page_bytes))
        return Grant(model, tuple(blocks), victims, tuple(_runs(model, fresh)))

    def release(self, model: str, blocks: tuple[int, ...]) -> tuple[PageRun, ...]:
        """Blocks of one grant are free again. -> pages to unmap. Raises ConfigError for a block that is not in use."""
        span = self._ranges[model]
        if not set(blocks) <= span.used or len(set(blocks)) != len(blocks):
            raise ConfigError(f"blocks {blocks} of {model!r} are not all in use", setting="blocks")
        span.give(blocks)
        for block in blocks:
            span.users.subtract(span.pages(block, self.page_bytes))
        idle = sorted(span.idle)
        return self._unmap(model, set(idle[1:]))

    @property
    def num_mapped(self) -> int:
        return sum(len(span.mapped) for span in self._ranges.values())

    def stats(self) -> VirtualizerStats:
        return VirtualizerStats(
            budget_pages=self.budget_pages,
            mapped_pages={name: len(span.mapped) for name, span in self._ranges.items()},
            used_pages={name: len(span.mapped) - len(span.idle) for name, span in self._ranges.items()},
            used_blocks={name: len(span.used) for name, span in self._ranges.items()},
        )

    def check(self) -> None:
        """Assert every invariant; for tests."""
        assert self.num_mapped <= self.budget_pages
        for span in self._ranges.values():
            users = Counter(page for block in span.used for page in span.pages(block, self.page_bytes))
            assert users == +span.users
            assert set(users) <= span.mapped, "a block in use has no page"
            assert len(span.idle) <= 1
            assert span.used.isdisjoint(span.free)
            assert len(span.used) + len(span.free) == span.next_block

    def _victims(self, short: int, model: str, touched: set[int]) -> tuple[PageRun, ...] | None:
        """Idle pages to unmap so that `short` more fit; None when there are not enough."""
        if short <= 0:
            return ()
        idle = [(name, page) for name, span in self._ranges.items() for page in sorted(span.idle)]
        idle = [(name, page) for name, page in idle if name != model or page not in touched]
        if len(idle) < short:
            return None
        runs: list[PageRun] = []
        for name, page in idle[:short]:
            runs += self._unmap(name, {page})
        return tuple(runs)

    def _unmap(self, model: str, pages: set[int]) -> tuple[PageRun, ...]:
        self._ranges[model].mapped -= pages
        return tuple(_runs(model, pages))


def _runs(model: str, pages: set[int]) -> Iterator[PageRun]:
    """Pages as runs of neighbours, ascending."""
    first = previous = None
    for page in sorted(pages):
        if first is None or previous is None or page != previous + 1:
            if first is not None and previous is not None:
                yield PageRun(model, first, previous - first + 1)
            first = page
        previous = page
    if first is not None and previous is not None:
        yield PageRun(model, first, previous - first + 1)
