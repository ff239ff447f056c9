"""KV memory of all models: the virtualizer's decisions carried out by the attention worker, over one arena."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy.typing as npt

from poolweave.crosspool_engine.config import EngineConfig
from poolweave.crosspool_engine.crew import Crew
from poolweave.crosspool_engine.kv_memory import KvMemory
from poolweave.crosspool_engine.served_model import ServedModel
from poolweave.crosspool_engine.virtualizer import PageRun, Virtualizer, VirtualizerStats
from poolweave.crosspool_engine.worker_messages import Locate, Pages
from poolweave.errors import WorkerLost
from poolweave.mempool import Arena


class KvPool:
    """Blocks come mapped and go unmapped; the host only counts. One driver. `crew` carries out what it is told."""

    def __init__(self, config: EngineConfig, arena: Arena, crew: Crew) -> None:
        self._config = config
        self._arena = arena
        self._crew = crew
        self._virtualizer = Virtualizer(config.budget_pages, config.page_bytes)
        self._models: dict[str, ServedModel] = {}

    @property
    def block_tokens(self) -> int:
        return self._config.block_tokens

    def open(self, model: ServedModel) -> None:
        """A range for a model that the workers serve. Costs no page."""
        self._virtualizer.add(model.name, block_bytes=model.layout.block_bytes, max_blocks=model.max_blocks)
        self._models[model.name] = model

    def close(self, name: str) -> None:
        """The range is gone with the worker's half. Raises ConfigError while blocks are in use."""
        self._virtualizer.remove(name)
        del self._models[name]

    def can_ever(self, name: str, num_tokens: int) -> bool:
        """Whether a request of so many tokens would fit if nothing else were here."""
        return self._virtualizer.can_ever(name, self._models[name].layout.num_blocks(num_tokens))

    def take(self, name: str, num_tokens: int) -> tuple[int, ...] | None:
        """Blocks for so many tokens, backed by memory; None where there is no room now. Raises WorkerLost."""
        grant = self._virtualizer.grant(name, self._models[name].layout.num_blocks(num_tokens))
        if grant is None:
            return None
        self._unmap(grant.unmap)
        if grant.map:
            runs = tuple((run.first, run.count) for run in grant.map)
            try:
                self._crew.attention.call(Pages(self._models[name].index, map=runs))
            except BaseException:
                self._virtualizer.release(name, grant.blocks)
                raise
        return grant.blocks

    def give(self, name: str, blocks: tuple[int, ...]) -> None:
        """Blocks of one take are free again. After the attention worker died there is nothing to unmap."""
        runs = self._virtualizer.release(name, blocks)
        if self._crew.attention.alive:
            self._unmap(runs)

    def forget(self) -> int:
        """The attention worker died with its mappings: no page is mapped any more. -> bytes that came back

        All blocks must have been given back.
        """
        for name, model in self._models.items():
            self._virtualizer.remove(name)
            self._virtualizer.add(name, block_bytes=model.layout.block_bytes, max_blocks=model.max_blocks)
        return self._arena.reap()

    def write(self, name: str, blocks: Sequence[int], rows: npt.NDArray[Any]) -> None:
        """KV that was computed elsewhere, into blocks that no batch uses yet."""
        self._memory(name).write(blocks, rows)

    def read(self, name: str, blocks: Sequence[int]) -> npt.NDArray[Any]:
        """A copy of blocks that no batch uses any more."""
        return self._memory(name).read(blocks)

    def stats(self) -> VirtualizerStats:
        return self._virtualizer.stats()

    @property
    def held_bytes(self) -> int:
        """Memory that ranges hold, as the arena counts it."""
        return self._arena.stats().held_bytes

    def check(self) -> None:
        """Assert all invariants, the host's count against the arena's; for tests."""
        self._virtualizer.check()
        self._arena.check()
        assert self.held_bytes == self._virtualizer.num_mapped * self._config.page_bytes

    def _unmap(self, runs: Iterable[PageRun]) -> None:
        for run in runs:
            try:
                self._crew.attention.call(Pages(self._models[run.model].index, unmap=((run.first, run.count),)))
            except WorkerLost:
                return  # its mappings went with it

    def _memory(self, name: str) -> KvMemory:
        model = self._models[name]

        def locate(pages: Sequence[int]) -> Sequence[int]:
            return self._crew.attention.call(Locate(model.index, tuple(pages)))

        return KvMemory(model.layout, self._arena.descriptors[0], self._config.page_bytes, locate)
