"""Hit: the blocks of the longest indexed prefix, pinned until closed. Knows no index."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType

import numpy as np
import numpy.typing as npt

from poolweave.errors import ConfigError
from poolweave.index import MissReason
from poolweave.mempool.blocks import Blocks


class Hit:
    """What match() found: whole blocks, `num_tokens` tokens of them, with one reference each that this object holds.

    A context manager. take() hands the references to the caller; closing drops them, more than once is harmless.
    `tiers` are Tier values at the time of the match, `miss_reason` says why the prefix ended there.
    """

    __slots__ = ("_open", "_release", "blocks", "miss_reason", "num_tokens", "tiers")

    def __init__(
        self,
        blocks: Blocks,
        num_tokens: int,
        tiers: npt.NDArray[np.uint8],
        miss_reason: MissReason,
        release: Callable[[Blocks], None],
    ) -> None:
        self.blocks = blocks
        self.num_tokens = num_tokens
        self.tiers = tiers
        self.miss_reason = miss_reason
        self._release = release
        self._open = True

    def take(self) -> Blocks:
        """The blocks; their references are the caller's from now on. Raises ConfigError when taken or closed before."""
        if not self._open:
            raise ConfigError("this hit was taken or closed before", setting="hit")
        self._open = False
        return self.blocks

    def close(self) -> None:
        """Drop the references, unless taken. Idempotent."""
        if self._open:
            self._open = False
            if len(self.blocks):
                self._release(self.blocks)

    def __enter__(self) -> Hit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", False) and len(self.blocks):
            warnings.warn(
                f"poolweave: a Hit of {len(self.blocks)} blocks was not closed: they stay pinned",
                ResourceWarning,
                stacklevel=2,
            )
