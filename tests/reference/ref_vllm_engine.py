"""A model of vLLM's scheduler and cache, small enough to trust: one cache group, no prefix cache of its own.

KV is a function of the prefix, so wrong KV anywhere is seen. It calls a connector's two sides as vLLM 0.32 does.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

LAYERS, BLOCK = 3, 4
PAGE = 8  # float32 numbers


@dataclass(eq=False)
class Request:
    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None
    mm_features: tuple[Any, ...] = ()
    pooling_params: Any = None
    output: list[int] = field(default_factory=list)
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    cached: int | None = None
    status: Any = field(default_factory=lambda: SimpleNamespace(name="RUNNING"))

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@functools.lru_cache(1 << 15)
def kv_number(tokens: tuple[int, ...]) -> int:
    """What the pages of these tokens hold in layer 0; more by one a layer."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % 65521


class Engine:
    def __init__(self, scheduler: Any, worker: Any, cache: np.ndarray, chunk: int = 8) -> None:
        self.scheduler, self.worker, self.cache, self.chunk = scheduler, worker, cache, chunk
        self.free = list(range(cache.shape[1]))
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, request: Request) -> Any:
        request.status.name = "FINISHED_ABORTED"
        return self._finish(request)

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.free += request.pages
        request.pages, request.computed = [], 0
        self.waiting.insert(0, request)

    def step(self) -> list[Request]:
        """One step; -> requests that ended. `told` of each is what its answer says."""
        new, cached = [], []
        for request in list(self.waiting):
            found = self.scheduler.lookup(request, 0)
            if found is None:
                continue
            if not self._allocate(request, min(found + self.chunk, len(request.all_token_ids))):
                break
            request.cached = found if request.cached is None else request.cached
            self.scheduler.allocated(request, request.pages, found)
            request.computed = found
            self.waiting.remove(request)
            new.append(request)
        for request in list(self.running):
            if self._allocate(request, min(request.computed + self.chunk, len(request.all_token_ids))):
                cached.append(request)
            else:
                self.preempt(request)
        self.running += new
        ended = self._forward(new, cached)
        return ended

    def _allocate(self, request: Request, tokens: int) -> bool:
        need = -(-tokens // BLOCK) - len(request.pages)
        if need > len(self.free):
            return False
        request.pages += [self.free.pop(0) for _ in range(need)]
        return True

    def _forward(self, new: list[Request], cached: list[Request]) -> list[Request]:
        batch = new + cached
        counts = {r.request_id: min(self.chunk, len(r.all_token_ids) - r.computed) for r in batch}
        pages = {r.request_id: r.pages for r in batch}
        plan = self.scheduler.plan(SimpleNamespace(
            num_scheduled_tokens=counts,
            scheduled_new_reqs=[SimpleNamespace(req_id=r.request_id, num_computed_tokens=r.computed) for r in new],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r in cached], num_computed_tokens=[r.computed for r in cached]
            ),
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (pages[name],)),
        ))  # fmt: skip
        self.worker.begin(plan)
        self.worker.load()
        bad = self.worker.failed_pages()
        for layer in range(LAYERS):
            for request in batch:
                self._compute(request, counts[request.request_id], layer, bad)
            self.worker.save_layer(f"layer.{layer}")
        report = self.worker.finish()
        ended = [r for r in batch if self._advance(r, counts[r.request_id], bad)]
        if report is not None:
            self.scheduler.settle(report)
        return ended

    def _compute(self, request: Request, count: int, layer: int, bad: set[int]) -> None:
        tokens = request.all_token_ids
        if not bad.intersection(request.pages):
            for block in range(request.computed // BLOCK):  # attention reads what was cached
                right = kv_number(tuple(tokens[: (block + 1) * BLOCK])) + layer
                assert (self.cache[layer, request.pages[block]] == right).all(), "wrong KV"
        for block in range(request.computed // BLOCK, (request.computed + count) // BLOCK):
            self.cache[layer, request.pages[block]] = kv_number(tuple(tokens[: (block + 1) * BLOCK])) + layer

    def _advance(self, request: Request, count: int, bad: set[int]) -> bool:
        lost = [block for block, page in enumerate(request.pages[: request.computed // BLOCK]) if page in bad]
        if lost:
            request.computed = lost[0] * BLOCK
            return False
        request.computed += count
        if request.computed < len(request.all_token_ids):
            return False
        request.output.append(zlib.crc32(bytes(str(request.all_token_ids), "ascii")) % 50)
        if len(request.output) < request.max_tokens:
            return False
        request.status.name = "FINISHED_LENGTH_CAPPED"
        request.told = self._finish(request)  # type: ignore[attr-defined]
        return True

    def _finish(self, request: Request) -> Any:
        told = self.scheduler.finished(request)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self.free += request.pages
        request.pages = []
        return told
