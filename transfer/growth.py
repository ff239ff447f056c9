"""What of a growing offer is ready: stretches of blocks and layers, and how far each block has come. Pure.

A growing offer lends blocks that are still computed. Its owner seals them layer by layer and says so, stretch by
stretch; the receiver pulls each stretch while the next one is computed. Source: MemServe §5.2 (by-layer transfer).

    layer 3 |  .  .  .  .         blocks 0 and 1 have come to layer 4, block 2 to layer 2, block 3 to none:
    layer 2 |  x  x  .  .         the next stretch of block 2 begins at layer 2
    layer 1 |  x  x  x  .
    layer 0 |  x  x  x  .
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from poolweave.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Stretch:
    """Layers [first_layer, end_layer) of blocks [first_block, end_block) of an offer, layers counted at the source."""

    first_block: int
    end_block: int
    first_layer: int
    end_layer: int

    def __post_init__(self) -> None:
        if not (0 <= self.first_block < self.end_block and 0 <= self.first_layer < self.end_layer):
            raise ConfigError(f"{self} is empty or turned round", setting="layers")

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)


class Coverage:
    """Up to which of `layers` each of `num_blocks` blocks has come. Not thread-safe."""

    def __init__(self, num_blocks: int, layers: range) -> None:
        self._all = layers
        self._layers = np.full(num_blocks, layers.start, np.int32)

    def add(self, stretch: Stretch) -> None:
        """Raises ConfigError for a stretch that leaves the blocks or layers, leaves a gap, or comes twice."""
        rows = self._layers[stretch.first_block : stretch.end_block]
        if stretch.end_block > len(self._layers) or stretch.end_layer > self._all.stop:
            raise ConfigError(
                f"{stretch} leaves {len(self._layers)} blocks and layers up to {self._all.stop}",
                setting="layers", value=stretch.end_layer, limit=self._all.stop,
            )  # fmt: skip
        if (rows != stretch.first_layer).any():
            raise ConfigError(
                f"{stretch} does not begin where its blocks ended: at layers {rows.min()} to {rows.max()}",
                setting="layers", value=stretch.first_layer, limit=int(rows.min()),
            )  # fmt: skip
        rows[:] = stretch.end_layer

    def missing(self, end_layer: int, first_block: int, end_block: int) -> list[Stretch]:
        """The stretches that bring blocks [first_block, end_block) to `end_layer`, alike neighbours together."""
        have = self._layers[first_block:end_block]
        edges = [0, *(np.flatnonzero(np.diff(have)) + 1).tolist(), len(have)] if len(have) else []
        return [
            Stretch(first_block + low, first_block + high, int(have[low]), end_layer)
            for low, high in itertools.pairwise(edges)
            if have[low] < end_layer
        ]

    def reached(self, num_blocks: int) -> int:
        """The layer up to which all of the first `num_blocks` blocks have come."""
        return int(self._layers[:num_blocks].min(initial=self._all.stop))

    @property
    def share(self) -> float:
        """Of all layers of all blocks: 0 to 1."""
        return float((self._layers - self._all.start).sum()) / max(1, len(self._layers) * len(self._all))

    @property
    def complete(self) -> bool:
        return self.reached(len(self._layers)) == self._all.stop
