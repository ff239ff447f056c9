"""What the scheduler's side asks of the worker's in one step, and what that answers. Values that can be pickled."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from poolweave.mempool import TierWindow
from poolweave.types import Int32Array

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Copies:
    """Block `pages[i]` of vLLM's cache and row `rows[i]` of the pool's memory: all layers move between them."""

    pages: Int32Array = field(default_factory=lambda: _NONE)
    rows: Int32Array = field(default_factory=lambda: _NONE)

    def __len__(self) -> int:
        return len(self.pages)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`loads` are done before the forward pass, `saves` layer by layer within it. `step` counts from 1; 0: no work.

    `progress`: where a ProgressWord is kept, if somebody waits for the saves' layers.
    """

    window: TierWindow
    step: int = 0
    loads: Copies = field(default_factory=Copies)
    saves: Copies = field(default_factory=Copies)
    progress: TierWindow | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """Steps whose copies are over; `failed` are those of which a load or a save did not go well."""

    steps: tuple[int, ...]
    failed: frozenset[int] = frozenset()

    def aggregate(self, other: StepReport) -> StepReport:
        """Of several workers: a step has gone well where it did on all of them."""
        return StepReport(tuple(dict.fromkeys(self.steps + other.steps)), self.failed | other.failed)
