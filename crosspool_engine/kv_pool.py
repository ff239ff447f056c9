"""KV memory of all models on one attention rank: the virtualizer's decisions, carried out by that rank's worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from poolweave.crosspool_engine.brought_kv import BroughtKv
from poolweave.crosspool_engine.crew import Crew
from poolweave.crosspool_engine.history import History, blocks_of
from poolweave.crosspool_engine.kv_memory import KvMemory
from poolweave.crosspool_engine.request import DecodeRequest
from poolweave.crosspool_engine.served_model import ServedModel
from poolweave.crosspool_engine.virtualizer import Grant, PageRun, Virtualizer, VirtualizerStats
from poolweave.crosspool_engine.worker_messages import Locate, Pages
from poolweave.errors import WorkerLost
from poolweave.index import Match
from poolweave.mempool import Arena
from poolweave.transfer.layout import KVLayout
from poolweave.types import TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class KvLease:
    """Blocks that a request has until it gives them back: first those found in history, then its own.

    KV of the first `num_computed` tokens is there.
    """

    blocks: tuple[int, ...]
    shared: int
    num_computed: int
    match: Match | None
    tenant: bytes
    reused_tokens: int = 0  # of those, by history


class KvPool:
    """Blocks come mapped and go unmapped; the host only counts. One driver. `crew` carries out what it is told.

    With `reuse`, whole blocks of requests that ended stay until their memory is needed.
    """

    def __init__(self, rank: int, arena: Arena, crew: Crew) -> None:
        config = crew.config
        self.rank = rank
        self.block_tokens = config.block_tokens
        self._page_bytes = config.page_bytes
        self._arena = arena
        self._crew = crew
        self._virtualizer = Virtualizer(config.budget_pages(rank), config.page_bytes)
        self._history = History(config.block_tokens) if config.reuse else None
        self._models: dict[str, ServedModel] = {}
        self._leased_bytes = 0

    # --- models ---------------------------------------------------------------------------------------------

    def open(self, model: ServedModel) -> None:
        """A range for a model that the worker serves. Costs no page."""
        self._add(model)
        self._models[model.name] = model

    def close(self, name: str) -> None:
        """The range is gone with the worker's half. Raises ConfigError while blocks are in use."""
        self.drop_history(name, mapped=False)
        self._virtualizer.remove(name)
        del self._models[name]

    def forget(self) -> int:
        """The worker died with its mappings: no page is mapped any more. -> bytes that came back

        All leases must have ended.
        """
        for name, model in self._models.items():
            self.drop_history(name, mapped=False)
            self._virtualizer.remove(name)
            self._add(model)
        return self._arena.reap()

    # --- requests -------------------------------------------------------------------------------------------

    def can_ever(self, name: str, num_tokens: int) -> bool:
        """Whether a request of so many tokens would fit if nothing else were here."""
        return self._virtualizer.can_ever(name, self._models[name].layout.num_blocks(num_tokens))

    def num_blocks(self, name: str, num_tokens: int) -> int:
        return self._models[name].layout.num_blocks(num_tokens)

    @property
    def free_bytes(self) -> int:
        """What of the budget no running request has: history gives way, so it counts as free."""
        return self._virtualizer.budget_pages * self._page_bytes - self._leased_bytes

    def known_tokens(self, request: DecodeRequest) -> int:
        """Tokens of a request whose KV history has here."""
        return (
            0
            if self._history is None
            else self._history.count(self._models[request.model].index, request.tenant, request.tokens)
        )

    def take(self, request: DecodeRequest, at_most: int | None = None) -> KvLease | None:
        """All the KV a request can need, backed by memory and filled with what it brings; None where there is no room.

        `at_most`: tokens that history may give. Raises WorkerLost; then nothing is held.
        """
        model = self._models[request.model]
        tokens = request.tokens if at_most is None else request.tokens[: at_most + 1]
        match = None if self._history is None else self._history.match(model.index, request.tenant, tokens)
        found = () if match is None else blocks_of(match.blocks)
        needed = model.layout.num_blocks(request.end - 1) - len(found)  # the last token's KV is never computed
        try:
            grant = self._grant(request.model, needed)
            if grant is None:
                _close(match)
                return None
            self._back(grant)
        except BaseException:
            _close(match)
            raise
        self._leased_bytes += (len(found) + needed) * self._layout(model).block_bytes
        reused = len(found) * self.block_tokens
        computed = max(request.num_computed, reused)
        lease = KvLease(found + grant.blocks, len(found), computed, match, request.tenant, reused)
        if request.kv is not None and len(found) < len(request.kv):
            brought = request.kv if isinstance(request.kv, BroughtKv) else BroughtKv.whole(request.kv)
            blocks = brought.blocks(len(found), model.kv_heads(self.rank))
            try:
                self._memory(request.model).write(lease.blocks[len(found) : len(brought)], blocks)
            except BaseException:
                self.give(request.model, lease)
                raise
        return lease

    def give(self, name: str, lease: KvLease, computed: TokenIds | None = None) -> None:
        """End a lease. `computed`: tokens whose KV is there and sound, so that whole blocks of them may stay."""
        self._leased_bytes -= len(lease.blocks) * self._layout(self._models[name]).block_bytes
        own = set(lease.blocks[lease.shared :])
        if computed is not None and self._history is not None:
            whole = len(computed) // self.block_tokens
            left = self._history.keep(self._models[name].index, lease.tenant, computed, lease.blocks[:whole])
            own -= set(lease.blocks[:whole]) - left
        _close(lease.match)
        self._release(name, tuple(sorted(own)))

    def read(self, name: str, blocks: Sequence[int]) -> npt.NDArray[Any]:
        """A copy of blocks that no batch uses any more."""
        return self._memory(name).read(blocks)

    def drop_history(self, name: str, *, mapped: bool = True) -> None:
        """Give up what no request uses of a model's history. `mapped` False: its pages are gone or go by themselves."""
        if self._history is not None:
            blocks = tuple(block for _, block in self._history.drop(self._models[name].index))
            self._release(name, blocks, mapped=mapped)

    # --- the whole ------------------------------------------------------------------------------------------

    def stats(self) -> VirtualizerStats:
        return self._virtualizer.stats()

    @property
    def num_history(self) -> int:
        """Blocks kept of requests that ended."""
        return 0 if self._history is None else len(self._history)

    @property
    def held_bytes(self) -> int:
        """Memory that ranges hold, as the arena counts it."""
        return self._arena.stats().held_bytes

    def check(self) -> None:
        """Assert all invariants, the host's count against the arena's; for tests."""
        self._virtualizer.check()
        self._arena.check()
        assert self.held_bytes == self._virtualizer.num_mapped * self._page_bytes

    # --- private --------------------------------------------------------------------------------------------

    def _layout(self, model: ServedModel) -> KVLayout:
        """Of this rank's heads."""
        return model.layout_on(self.rank)

    def _add(self, model: ServedModel) -> None:
        block_bytes = self._layout(model).block_bytes
        self._virtualizer.add(model.name, block_bytes=block_bytes, max_blocks=model.max_blocks[self.rank])

    def _grant(self, name: str, needed: int) -> Grant | None:
        """Blocks, where need be in the place of history."""
        while (grant := self._virtualizer.grant(name, needed)) is None:
            given_up = [] if self._history is None else list(self._history.evict(max(1, needed)))
            if not given_up:
                return None
            names = {model.index: own for own, model in self._models.items()}
            for index in {index for index, _ in given_up}:
                self._release(names[index], tuple(block for i, block in given_up if i == index))
        return grant

    def _back(self, grant: Grant) -> None:
        """Map what a grant needs mapped, or take it back."""
        self._unmap(grant.unmap)
        if not grant.map:
            return
        runs = tuple((run.first, run.count) for run in grant.map)
        try:
            self._crew.workers[self.rank].call(Pages(self._models[grant.model].index, map=runs))
        except BaseException:
            self._virtualizer.release(grant.model, grant.blocks)
            raise

    def _release(self, name: str, blocks: tuple[int, ...], *, mapped: bool = True) -> None:
        runs = self._virtualizer.release(name, blocks)
        if mapped and self._crew.workers[self.rank].alive:
            self._unmap(runs)

    def _unmap(self, runs: Iterable[PageRun]) -> None:
        for run in runs:
            try:
                order = Pages(self._models[run.model].index, unmap=((run.first, run.count),))
                self._crew.workers[self.rank].call(order)
            except WorkerLost:
                return  # its mappings went with it

    def _memory(self, name: str) -> KvMemory:
        model = self._models[name]

        def locate(pages: Sequence[int]) -> Sequence[int]:
            return self._crew.workers[self.rank].call(Locate(model.index, tuple(pages)))

        return KvMemory(self._layout(model), self._arena.descriptors[0], self._page_bytes, locate)


def _close(match: Match | None) -> None:
    if match is not None:
        match.close()
