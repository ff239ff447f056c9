"""A made-up accelerator whose kernels are timed from first principles: ground truth for cost models.

It is not built from the models under test: waves end unevenly, attention counts the pairs below the diagonal, the
all-reduce has a size-dependent efficiency, and each measurement carries noise.
"""

from __future__ import annotations

import math
import random

SMS = 132
HIDDEN, FFN, HEADS, LAYERS = 5120, 13824, 40, 40
GEMMS = {"qkv": 3 * HIDDEN, "out": HIDDEN, "up": 2 * FFN, "down": HIDDEN}  # output columns
DEPTH = {"qkv": HIDDEN, "out": HIDDEN, "up": HIDDEN, "down": FFN}
TILE = 128


class Device:
    def __init__(self, seed: int = 0, noise: float = 0.02) -> None:
        self._random = random.Random(seed)
        self._noise = noise

    def gemm_s(self, name: str, new: int, tp: int = 1) -> float:
        columns, depth = GEMMS[name], DEPTH[name]
        if name in ("out", "down"):
            depth //= tp  # row parallel
        else:
            columns //= tp
        blocks = math.ceil(new / TILE) * math.ceil(columns / TILE)
        full, rest = divmod(blocks, SMS)
        tile_s = 2 * TILE * TILE * depth / 5e12
        wave_s = tile_s + 1.5e-6
        tail_s = (0.85 * tile_s + 0.15 * tile_s * rest / SMS + 1.5e-6) if rest else 0.0
        return self._measured(4e-6 + full * wave_s + tail_s)

    def attention_s(self, new: int, prompt: int, tp: int = 1) -> float:
        pairs = new * prompt - new * (new - 1) / 2
        return self._measured(6e-6 + pairs * 4 * HIDDEN / tp / 300e12 + prompt * 4 * HIDDEN / tp / 2.5e12)

    def norm_s(self, new: int) -> float:
        return self._measured(3e-6 + new * HIDDEN * 4 / 2e12)

    def reduce_s(self, new: int, tp: int) -> float:
        if tp == 1:
            return 0.0
        nbytes = 2 * (tp - 1) / tp * new * HIDDEN * 2
        return self._measured(12e-6 + nbytes / (180e9 * nbytes / (nbytes + 1e6)))

    def prefill_s(self, new: int, prompt: int, tp: int = 1) -> float:
        layer = sum(self.gemm_s(name, new, tp) for name in GEMMS) + self.attention_s(new, prompt, tp)
        return LAYERS * (layer + 2 * self.norm_s(new) + 2 * self.reduce_s(new, tp))

    def _measured(self, seconds: float) -> float:
        return seconds * (1 + self._noise * self._random.uniform(-1, 1))
