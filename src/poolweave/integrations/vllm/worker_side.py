"""The worker's side: copies whole blocks between vLLM's cache and the pool's memory. Decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from poolweave.errors import PoolweaveError
from poolweave.integrations.vllm._native import TierGeometry, swap_planes
from poolweave.integrations.vllm.progress_word import ProgressWord
from poolweave.integrations.vllm.step_plan import Copies, StepPlan, StepReport
from poolweave.mempool import TierWindow
from poolweave.types import Int32Array

logger = logging.getLogger(__name__)

Copy = Callable[[Sequence[TierGeometry], Sequence[TierGeometry], Int32Array, Int32Array], None]


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """One layer of vLLM's cache: page `i` lies at `address + i * page_bytes`."""

    address: int
    num_pages: int
    page_bytes: int


class WorkerSide:
    """One worker's copies. `begin` and `finish` bracket a step; between them `save_layer` comes once a layer.

    Nothing here raises for a copy that fails: the blocks are told by `failed_pages()` and `finish()`, vLLM computes
    them anew, and what was computed from them is not kept.
    """

    def __init__(self, layers: Mapping[str, CacheLayer], threads: int, copy: Copy | None = None) -> None:
        """`copy(sources, targets, from_slots, to_slots)` moves pages, layer by layer; by default the core's."""
        self._layers = [TierGeometry(layer.address, layer.page_bytes, 0) for layer in layers.values()]
        self._position = {name: position for position, name in enumerate(layers)}
        self._page_bytes = next(iter(layers.values())).page_bytes
        self._threads = threads
        self._copy = copy or self._copy_native
        self._window: TierWindow | None = None
        self._memory: npt.NDArray[np.uint8] | None = None
        self._rows: list[TierGeometry] = []
        self._plan: StepPlan | None = None
        self._saved: set[int] = set()
        self._failed_pages: set[int] = set()
        self._failed = False
        self._word: ProgressWord | None = None

    def begin(self, plan: StepPlan) -> None:
        """Take the step's plan; no plan is under way."""
        self._plan, self._failed = plan, False
        self._saved.clear()

    def load(self) -> None:
        """Bring the plan's loads into vLLM's cache, before the forward pass reads it."""
        plan = self._plan
        if plan is None or not len(plan.loads):
            return
        try:
            self._open(plan.window)
            self._load(plan.loads)
        except PoolweaveError as error:
            for page, row in zip(plan.loads.pages.tolist(), plan.loads.rows.tolist(), strict=True):
                self._load_one(page, row)
            failed = len(self._failed_pages)
            logger.warning("%d of %d blocks did not load, they are computed: %s", failed, len(plan.loads), error)

    def save_layer(self, name: str) -> None:
        """This layer's KV of the step has been computed: keep what the plan says."""
        plan = self._plan
        if plan is None or not len(plan.saves):
            return
        position = self._position.get(name)
        if position is None:
            return
        try:
            self._open(plan.window)
            layer, rows = self._layers[position], self._rows[position]
            self._copy([layer], [rows], plan.saves.pages, plan.saves.rows)
            self._saved.add(position)
            if plan.progress is not None and len(self._saved) == position + 1:
                self._tell(plan.progress, plan.step, position + 1)
        except PoolweaveError as error:
            self._fail(error)

    def finish(self) -> StepReport | None:
        """End the step: None when there was nothing to do. A save that missed a layer has failed."""
        plan, self._plan = self._plan, None
        if plan is None or not plan.step:
            return None
        missed = bool(len(plan.saves)) and len(self._saved) != len(self._layers)
        failed = self._failed or missed
        return StepReport((plan.step,), frozenset((plan.step,)) if failed else frozenset())

    def failed_pages(self) -> set[int]:
        """Pages of vLLM's cache whose load failed since the last call."""
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    def _load(self, loads: Copies) -> None:
        self._copy(self._rows, self._layers, loads.rows, loads.pages)

    def _load_one(self, page: int, row: int) -> None:
        """A batch failed: only what fails by itself has to be computed anew."""
        one: Sequence[Int32Array] = (np.array([page], np.int32), np.array([row], np.int32))
        try:
            if not self._rows:
                raise PoolweaveError("the pool's memory is not there")
            self._load(Copies(*one))
        except PoolweaveError:
            self._failed = True
            self._failed_pages.add(page)

    def _fail(self, error: PoolweaveError) -> None:
        if not self._failed:
            logger.warning("what this step computed is not kept: %s", error)
        self._failed = True

    def _tell(self, progress: TierWindow, step: int, layers: int) -> None:
        if self._word is None or self._word.window != progress:
            self._word = ProgressWord(progress)
        self._word.write(step, layers)

    def _open(self, window: TierWindow) -> None:
        if window == self._window:
            return
        self._window, self._rows = None, []
        self._memory = window.open()
        base = self._memory.ctypes.data
        self._rows = [
            TierGeometry(base + position * window.plane_bytes, window.row_bytes, 0)
            for position in range(len(self._layers))
        ]
        self._window = window

    def _copy_native(
        self,
        sources: Sequence[TierGeometry],
        targets: Sequence[TierGeometry],
        from_slots: Int32Array,
        to_slots: Int32Array,
    ) -> None:
        swap_planes(sources, targets, from_slots, to_slots, self._page_bytes, self._threads)
