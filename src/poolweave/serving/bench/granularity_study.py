"""By layer or by request, discrete or aggregated, over load: when is a prompt's KV at its peer?

Source: MemServe Fig. 12.
One instance computes prompts one after the other, `layer_ms` a layer, as an accelerator beside the host's processor
would. Prompts arrive at random (Poisson), at a share of what the instance can compute.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from poolweave.mempool import Blocks, MemPool
from poolweave.serving.bench.config import StudyConfig
from poolweave.serving.bench.layout_study import spec_of
from poolweave.serving.bench.peer import Peer
from poolweave.serving.bench.points import GranularityPoint
from poolweave.transfer import CostMeter, LayerWork, Transfer, TransferReport, layers_per_step
from poolweave.transfer.layout import Order

_TIMEOUT_S = 120.0
_ROUNDS = 2  # each with prompts enough to queue
_AHEAD = 4  # prompts whose KV may be under way at once


@dataclass(frozen=True, slots=True)
class Mode:
    """One curve of the figure. `auto` chooses its step from what the curves before it have cost."""

    name: str
    order: Order
    by_layer: bool
    auto: bool = False


MODES = (
    Mode("by-req", "layered", by_layer=False),
    Mode("by-layer", "layered", by_layer=True),
    Mode("by-req-agg", "aggregated", by_layer=False),
    Mode("by-layer-agg", "aggregated", by_layer=True),
    Mode("auto-agg", "aggregated", by_layer=True, auto=True),
)


@dataclass(slots=True)
class Learned:
    """Costs seen so far over one transport."""

    meter: CostMeter = field(default_factory=CostMeter)
    steps: int = 0
    held_up_s: float = 0.0  # the next layers, by all these steps: a device computes on beside the telling

    @property
    def tell_s(self) -> float:
        return self.held_up_s / self.steps if self.steps else 0.0


@dataclass(slots=True)
class _Sent:
    """One prompt: when it arrived, was computed, and was there."""

    arrived: float
    computed: float
    transfer: Transfer
    there: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)


def count(config: StudyConfig) -> int:
    """How many points there will be."""
    return len(config.transports) * len(MODES) * len(config.loads)


def measure(config: StudyConfig, peer: Peer) -> Iterator[GranularityPoint]:
    """At each load all granularities take turns, so that what else runs on the machine meets them alike."""
    per_prompt = config.model.layout("aggregated").num_blocks(config.prompt_tokens)
    orders = dict.fromkeys(mode.order for mode in MODES)
    rounds = [len(one) for one in np.array_split(np.arange(config.requests), min(_ROUNDS, config.requests))]
    for transport in config.transports:
        learned = Learned()
        specs = [spec_of(config, order, transport, 1, (_AHEAD + 1) * per_prompt) for order in orders]
        with ExitStack() as stack:
            ways = {}
            for order, spec, (instance, address) in zip(orders, specs, peer.open(*specs), strict=True):
                pool = stack.enter_context(spec.open())
                pool.view()[:] = 1
                pool.connect(instance, address)
                ways[order] = pool, instance
            instances = [_Instance(config, *ways[mode.order], mode, learned) for mode in MODES]
            for one in instances:
                one.run(1.0, 2, 0)  # dials, fills caches, and learns costs
            for load in config.loads:
                sent: list[list[_Sent]] = [[] for _ in MODES]
                for seed, requests in enumerate(rounds):
                    for one, its in zip(instances, sent, strict=True):
                        its += one.run(load, requests, seed)
                for mode, its in zip(MODES, sent, strict=True):
                    yield _point(transport, mode, load, its)


class _Instance:
    """Computes prompts and hands their KV over in one way."""

    def __init__(self, config: StudyConfig, pool: MemPool, peer: str, mode: Mode, learned: Learned) -> None:
        self._config = config
        self._pool = pool
        self._peer = peer
        self._mode = mode
        self._learned = learned
        self._layers = pool.layout.num_layers
        self._layer_s = config.layer_ms / 1e3
        self._num_blocks = pool.layout.num_blocks(config.prompt_tokens)
        self._slots = threading.Semaphore(_AHEAD)

    def run(self, load: float, requests: int, seed: int) -> list[_Sent]:
        """Prompts at `load`, the same for a seed, until their KV is at the peer. Raises what a transfer fails with."""
        gaps = np.random.default_rng(seed).exponential(self._layers * max(self._layer_s, 1e-6) / load, requests)
        start = time.perf_counter()
        sent: list[_Sent] = []
        for arrives in np.cumsum(gaps).tolist():
            _sleep_until(start + arrives)
            if not self._slots.acquire(timeout=_TIMEOUT_S):
                sent[0].transfer.result(0)
            sent.append(self._compute(start + arrives))
        for one in sent:
            report = one.transfer.result(_TIMEOUT_S)
            one.done.wait(_TIMEOUT_S)
            self._learned.meter.observe(
                steps=report.steps, calls=report.calls, nbytes=report.nbytes, seconds=report.pull_s
            )
        return sent

    def _compute(self, arrived: float) -> _Sent:
        blocks = self._pool.alloc(self._num_blocks)
        step = self._step()
        transfer = self._offer(blocks, growing=True) if step < self._layers else None
        sealed, at = 0, time.perf_counter()
        for layer in range(1, self._layers + 1):
            at += self._layer_s
            _sleep_until(at)
            if transfer is not None and (layer % step == 0 or layer == self._layers):
                self._pool.seal(blocks, range(sealed, layer))
                if layer < self._layers:
                    transfer.ready(layer)
                    self._learned.steps += 1
                    self._learned.held_up_s += max(0.0, time.perf_counter() - at - self._layer_s)
                sealed = layer
        computed = time.perf_counter()
        if transfer is None:
            self._pool.seal(blocks)
            transfer = self._offer(blocks, growing=False)
        one = _Sent(arrived, computed, transfer)
        transfer.add_done_callback(lambda _: self._there(one, blocks))
        if step < self._layers:
            transfer.ready()
        return one

    def _there(self, one: _Sent, blocks: Blocks) -> None:
        one.there = time.perf_counter()
        self._pool.free(blocks)
        self._slots.release()
        one.done.set()

    def _offer(self, blocks: Blocks, *, growing: bool) -> Transfer:
        return self._pool.transfer(self._peer, blocks, tag=b"", growing=growing)

    def _step(self) -> int:
        if not self._mode.by_layer:
            return self._layers
        if not self._mode.auto:
            return 1
        work = LayerWork(
            layout=self._pool.layout, num_blocks=self._num_blocks, layer_s=self._layer_s, tell_s=self._learned.tell_s
        )
        return layers_per_step(work, self._learned.meter.costs())


def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


def _point(transport: str, mode: Mode, load: float, sent: list[_Sent]) -> GranularityPoint:
    reports: list[TransferReport] = [one.transfer.result(0) for one in sent]
    total = sorted(one.there - one.arrived for one in sent)
    moved = sum(report.nbytes for report in reports)
    return GranularityPoint(
        transport=transport, granularity=mode.name, load=load,
        steps=statistics.mean(report.steps for report in reports),
        calls=statistics.mean(report.calls for report in reports), mean_s=statistics.mean(total),
        p99_s=total[min(len(total) - 1, int(0.99 * len(total)))],
        exposed_s=statistics.median(one.there - one.computed for one in sent),
        early_share=sum(report.early_nbytes for report in reports) / moved if moved else 0.0,
    )  # fmt: skip
