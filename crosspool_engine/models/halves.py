"""The two roles of a worker process: load a half, serve it natively, give it back whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from poolweave.crosspool_engine._native import AttentionStack, AttentionWorker, Board, FfnStack, FfnWorker, KvView
from poolweave.crosspool_engine.ffn_placement import FfnPart
from poolweave.crosspool_engine.head_shard import HeadShard
from poolweave.crosspool_engine.kv_layout import kv_layout
from poolweave.crosspool_engine.models.attention_side import build_attention_stack
from poolweave.crosspool_engine.models.checkpoint import Checkpoint
from poolweave.crosspool_engine.models.ffn_side import build_ffn_stack
from poolweave.crosspool_engine.worker_messages import Activate, Locate, Pages, WorkerSpec
from poolweave.errors import ConfigError
from poolweave.mempool import Arena


@dataclass(frozen=True, slots=True)
class _ServedAttention:
    stack: AttentionStack
    kv: KvView
    range: Any  # mempool's Range


class AttentionHalf:
    """All but the FFN, with each model's KV range: this process maps the pages it reads."""

    def __init__(self, board: Board, spec: WorkerSpec) -> None:
        assert spec.arena_fds is not None
        self._spec = spec
        self._arena = Arena.attach(*spec.arena_fds)
        self._worker = AttentionWorker(board, spec.rank)
        self._served: dict[int, _ServedAttention] = {}

    def activate(self, order: Activate) -> None:
        checkpoint = Checkpoint(order.path, order.dtype)
        shard = HeadShard(order.share, order.width)
        stack = build_attention_stack(checkpoint, shard, kernels=self._spec.kernels)
        layout = kv_layout(checkpoint.shape, block_tokens=self._spec.block_tokens, dtype=order.dtype, shard=shard)
        span = self._arena.reserve(order.max_blocks * layout.block_bytes)
        kv = KvView(layout.view(span.buffer(), order.max_blocks))
        self._worker.activate(order.index, stack, kv)
        self._served[order.index] = _ServedAttention(stack, kv, span)

    def deactivate(self, index: int) -> None:
        self._worker.deactivate(index)
        served = self._served.pop(index, None)
        if served is not None:
            served.range.drop(0, served.range.num_pages)

    def change_pages(self, order: Pages) -> None:
        span = self._served[order.index].range
        for first, count in order.unmap:
            span.unmap(first, count)
        for first, count in order.map:
            span.map(first, count)

    def locate(self, order: Locate) -> tuple[int, ...]:
        span = self._served[order.index].range
        return tuple(span.page_at(page) for page in order.pages)

    def step(self, slot: int) -> None:
        self._worker.step(slot)

    def run(self) -> None:
        self._worker.run()


class FfnHalf:
    """FFN layers of one weights rank; it has no KV."""

    def __init__(self, board: Board, spec: WorkerSpec) -> None:
        self._spec = spec
        self._worker = FfnWorker(board, spec.rank)
        self._served: dict[int, FfnStack] = {}

    def activate(self, order: Activate) -> None:
        part = FfnPart(order.layers, order.experts, order.unrouted)
        stack = build_ffn_stack(Checkpoint(order.path, order.dtype), part, kernels=self._spec.kernels)
        here = {layer: place for place, layer in enumerate(order.layers)}
        self._worker.activate(order.index, stack, [here.get(layer, -1) for layer in range(order.num_layers)])
        self._served[order.index] = stack

    def deactivate(self, index: int) -> None:
        self._worker.deactivate(index)
        self._served.pop(index, None)

    def change_pages(self, order: Pages) -> None:
        raise ConfigError("an FFN rank holds no KV", setting="index", value=order.index)

    def locate(self, order: Locate) -> tuple[int, ...]:
        raise ConfigError("an FFN rank holds no KV", setting="index", value=order.index)

    def step(self, slot: int) -> None:
        self._worker.step(slot)

    def run(self) -> None:
        self._worker.run()
