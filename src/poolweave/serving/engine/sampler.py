"""Next tokens from logits: greedy, temperature, top-p. Draws are functions of (seed, position) alone."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch

from poolweave.serving.engine.sequence import Sequence


def sample(logits: torch.Tensor, sequences: Rows[Sequence]) -> list[int | None]:
    """One token for each row of `logits` [n, vocab]; None where a row holds no usable number (NaN or +inf)."""
    best, tokens = logits.max(-1)
    usable = best.isfinite().tolist()
    chosen: list[int | None] = tokens.tolist()
    for index, sequence in enumerate(sequences):
        if not usable[index]:
            chosen[index] = None
        elif sequence.sampling.temperature > 0:
            chosen[index] = _draw(logits[index], sequence)
    return chosen


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else: a counter-based generator keyed by the seed."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def _draw(logits: torch.Tensor, sequence: Sequence) -> int:
    """Inverse transform over the nucleus: the most likely tokens whose probability together reaches top_p."""
    params = sequence.sampling
    scaled = (logits.float() - logits.max().float()) / params.temperature  # at most 0: no temperature overflows
    probabilities, order = scaled.softmax(-1).sort(descending=True, stable=True)
    cumulative = probabilities.double().cumsum(-1)
    total = float(cumulative[-1])
    nucleus = int(torch.searchsorted(cumulative, params.top_p * total)) + 1 if params.top_p < 1 else len(order)
    nucleus = min(nucleus, len(order))
    mass = float(cumulative[nucleus - 1])
    drawn = uniform(sequence.seed, len(sequence.tokens)) * mass
    index = int(torch.searchsorted(cumulative, drawn, right=True))
    return int(order[min(index, nucleus - 1)])
