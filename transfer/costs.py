"""What moving KV to a peer costs: a fixed part a step, one a call (a run of memory) and one a byte, as measured.

Pure: the caller has the clock.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

import numpy as np

_MOST_KEPT = 64  # transfers; a later one counts as much as an earlier one, and older ones are forgotten
_SUBSETS = [list(used) for size in (1, 2, 3) for used in itertools.combinations((2, 1, 0), size)]
_BETTER = 1e-12  # squared relative error; of fits as good the first one is taken: bytes before calls before steps


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCosts:
    """Seconds. The defaults are a start: shared memory of a slow machine, until something was measured."""

    per_step_s: float = 1e-4
    per_call_s: float = 1e-6
    per_byte_s: float = 2.5e-10

    def seconds(self, steps: int, calls: int, nbytes: int) -> float:
        """What a transfer in so many steps, calls and bytes takes."""
        return steps * self.per_step_s + calls * self.per_call_s + nbytes * self.per_byte_s


class CostMeter:
    """Fits the three costs to the last transfers by least squares. Not thread-safe.

    Costs are never negative: of all fits with some costs at zero, the best that holds is taken.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, int, int, float]] = deque(maxlen=_MOST_KEPT)
        self._fitted: TransferCosts | None = TransferCosts()

    def observe(self, *, steps: int, calls: int, nbytes: int, seconds: float) -> None:
        """A transfer took `seconds` of its receiver's time in all its steps together."""
        if steps > 0 and seconds > 0:
            self._seen.append((steps, calls, nbytes, seconds))
            self._fitted = None

    @property
    def num_observed(self) -> int:
        return len(self._seen)

    def costs(self) -> TransferCosts:
        """The fit; the defaults before anything was observed. Cost O(transfers kept), once after each."""
        if self._fitted is None:
            self._fitted = _fit(np.array(self._seen, np.float64))
        return self._fitted


def _fit(seen: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> TransferCosts:
    """From the normal equations, which are of three costs, however many transfers there are."""
    work = seen[:, :3] / seen[:, 3:]  # relative errors count alike, small and large
    scale = np.sqrt((work**2).sum(axis=0))
    scale[scale == 0] = 1.0
    work /= scale
    squares, products = work.T @ work, work.sum(axis=0)
    best, best_error = np.zeros(3), np.inf
    for used in _SUBSETS:
        found, *_ = np.linalg.lstsq(squares[used][:, used], products[used], rcond=None)
        error = float(((work[:, used] @ found - 1.0) ** 2).sum())
        if (found >= 0).all() and error < best_error - _BETTER:
            best, best_error = np.zeros(3), error
            best[used] = found
    per_step_s, per_call_s, per_byte_s = (best / scale).tolist()
    return TransferCosts(per_step_s=per_step_s, per_call_s=per_call_s, per_byte_s=per_byte_s)
