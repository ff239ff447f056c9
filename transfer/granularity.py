"""How finely KV is handed over while it is computed: by layer, by a few layers, or by request, whichever ends first.

Pure. Source: MemServe §5.2 (by-request, by-layer; with aggregated blocks by-req-agg, by-layer-agg).

    compute   | layer 0 | layer 1 | layer 2 | layer 3 |          by layer: only the last layer's transfer is left at
    by layer            | 0  |    | 1  |    | 2  |    | 3  |     the end, but each step costs its fixed part
    by request                                        |  0 1 2 3  |
"""

from __future__ import annotations

from dataclasses import dataclass

from poolweave.transfer.costs import TransferCosts
from poolweave.transfer.layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """KV of `num_blocks` blocks, computed in `layer_s` a layer. `tell_s`: for how long a step holds computing up."""

    layout: KVLayout
    num_blocks: int
    layer_s: float
    tell_s: float

    def seconds(self, layers: int, costs: TransferCosts) -> float:
        """What moving so many layers in one step takes."""
        calls = self.num_blocks * self.layout.runs(layers)
        return costs.seconds(1, calls, self.num_blocks * layers * len(self.layout.parts) * self.layout.plane_bytes)


def layers_per_step(work: LayerWork, costs: TransferCosts) -> int:
    """Layers that are handed over together so that the transfer ends soonest; all of them means by request.

    Cost O(n log n) of the layers. Of equal ones the coarsest.
    """
    total = work.layout.num_layers
    return min(range(total, 0, -1), key=lambda layers: ends_after(work, costs, layers))


def ends_after(work: LayerWork, costs: TransferCosts, layers: int) -> float:
    """Seconds from the first layer's start until all KV is there, handed over by `layers` layers a step."""
    total, computed, moved = work.layout.num_layers, 0.0, 0.0
    for first in range(0, total, layers):
        count = min(layers, total - first)
        computed += count * work.layer_s + work.tell_s
        moved = max(computed, moved) + work.seconds(count, costs)
    return moved
