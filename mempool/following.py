"""Following: a growing transfer while it comes, its blocks kept by references of the follower's own."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

from poolweave.errors import InstanceClosed
from poolweave.mempool.blocks import Blocks
from poolweave.transfer import Arriving
from poolweave.types import Int32Array

if TYPE_CHECKING:
    from poolweave.mempool.pool import MemPool


class Following:
    """`blocks` in token order, one reference each for the follower until closed; they are read-only.

    A layer of them may be read once wait() returned for it. A context manager; closing is harmless more than once.
    """

    __slots__ = ("_arriving", "_open", "_pool", "blocks")

    def __init__(self, pool: MemPool, arriving: Arriving, owner: int) -> None:
        self._arriving = arriving
        self._pool = pool
        self._open = True
        self.blocks = Blocks(arriving.blocks, owner)
        pool.retain(self.blocks)

    @property
    def num_tokens(self) -> int:
        return self._arriving.num_tokens

    @property
    def tokens(self) -> Int32Array | None:
        """None when the sender named none."""
        return self._arriving.tokens

    @property
    def layers(self) -> int:
        """Leading layers that all blocks have by now."""
        return self._arriving.layers

    def wait(self, layers: int, num_blocks: int | None = None, timeout: float | None = None) -> None:
        """Until the first `layers` layers of the first `num_blocks` blocks (None: all) are here and checked.

        Raises what the transfer failed with, or TransferTimeout after `timeout` seconds.
        """
        self._arriving.wait(layers, num_blocks, timeout)

    def close(self) -> None:
        """Drop the references. Idempotent."""
        if self._open:
            self._open = False
            with contextlib.suppress(InstanceClosed):  # the pool went first, and the references with it
                self._pool.free(self.blocks)

    def __enter__(self) -> Following:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
