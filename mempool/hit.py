"""Hit: the blocks of the longest indexed prefix, pinned until closed. Knows no index."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from poolweave.holding import Holding
from poolweave.index import MissReason
from poolweave.mempool.blocks import Blocks


class Hit(Holding[Blocks]):
    """What match() found: whole blocks, `num_tokens` tokens of them, with one reference each that this object holds.

    A context manager. take() hands the references to the caller; closing drops them, more than once is harmless.
    `tiers` are Tier values at the time of the match, `miss_reason` says why the prefix ended there.
    """

    __slots__ = ("_release", "miss_reason", "num_tokens", "tiers")
    _kind = "hit"

    def __init__(
        self,
        blocks: Blocks,
        num_tokens: int,
        tiers: npt.NDArray[np.uint8],
        miss_reason: MissReason,
        release: Callable[[Blocks], None],
    ) -> None:
        super().__init__(blocks)
        self.num_tokens = num_tokens
        self.tiers = tiers
        self.miss_reason = miss_reason
        self._release = release

    def _drop(self) -> None:
        self._release(self.blocks)
