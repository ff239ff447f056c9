"""Whether and how finely an instance hands KV over while it computes it, from what hand-overs have cost so far."""

from __future__ import annotations

import threading
from typing import Literal, get_args

from poolweave.errors import ConfigError
from poolweave.transfer import CostMeter, KVLayout, LayerWork, TransferReport, layers_per_step

Granularity = Literal["auto", "by-layer", "by-request"]

_WEIGHT = 0.3  # of the newest chunk in what a block and layer takes to compute


def check_granularity(name: str) -> None:
    """Raises ConfigError for what is none."""
    if name not in get_args(Granularity):
        raise ConfigError(
            f"granularity {name!r} is not one of {', '.join(get_args(Granularity))}", setting="granularity", value=name
        )


class HandOverPolicy:
    """Of one instance: learns from each chunk it computes and each transfer it made. Thread-safe.

    "auto" chooses the number of layers by which the hand-over ends soonest; all layers are a hand-over by request.
    """

    def __init__(self, layout: KVLayout, granularity: Granularity = "auto") -> None:
        check_granularity(granularity)
        self._layout = layout
        self._granularity = granularity
        self._lock = threading.Lock()
        self._meter = CostMeter()
        self._block_layer_s = 0.0  # to compute one layer of one block
        self._tell_s = 0.0  # to seal and tell one step

    @property
    def is_early(self) -> bool:
        """KV may leave before the prompt is computed."""
        return self._granularity != "by-request"

    def layers_per_step(self, num_blocks: int) -> int:
        """Layers of the last `num_blocks` blocks of a prompt that go together; by layer before anything is known."""
        if self._granularity == "by-request":
            return self._layout.num_layers
        with self._lock:
            if self._granularity == "by-layer" or not self._block_layer_s:
                return 1
            layer_s = self._block_layer_s * num_blocks
            work = LayerWork(layout=self._layout, num_blocks=num_blocks, layer_s=layer_s, tell_s=self._tell_s)
            return layers_per_step(work, self._meter.costs())

    def observe_chunk(self, num_blocks: int, seconds: float, tell_s: float) -> None:
        """All layers of so many blocks took `seconds`, telling a step `tell_s` of them."""
        with self._lock:
            block_layer_s = seconds / (num_blocks * self._layout.num_layers)
            known = self._block_layer_s > 0
            self._block_layer_s += (block_layer_s - self._block_layer_s) * (_WEIGHT if known else 1.0)
            self._tell_s += (tell_s - self._tell_s) * (_WEIGHT if known else 1.0)

    def observe_transfer(self, report: TransferReport) -> None:
        """What the receiver spent on a transfer that moved something."""
        if report.nbytes:
            with self._lock:
                self._meter.observe(steps=report.steps, calls=report.calls, nbytes=report.nbytes, seconds=report.pull_s)
