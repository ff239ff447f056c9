"""Received: blocks that another instance sent, owned until closed or taken."""

from __future__ import annotations

import contextlib
from types import TracebackType

from poolweave.errors import InstanceClosed
from poolweave.mempool.blocks import Blocks
from poolweave.transfer import Arrival
from poolweave.types import Int32Array


class Received:
    """`blocks` in token order, matched here and pulled, one reference each; `num_tokens` of them are valid.

    A context manager. take() hands the references to the caller; closing drops them, more than once is harmless.
    `tokens` is None when the sender named none.
    """

    __slots__ = ("_arrival", "blocks")

    def __init__(self, arrival: Arrival, owner: int) -> None:
        self._arrival = arrival
        self.blocks = Blocks(arrival.blocks, owner)

    @property
    def peer(self) -> str:
        return self._arrival.peer

    @property
    def num_tokens(self) -> int:
        return self._arrival.num_tokens

    @property
    def tokens(self) -> Int32Array | None:
        return self._arrival.tokens

    @property
    def pulled_blocks(self) -> int:
        """How many of `blocks` moved; the rest was here already."""
        return self._arrival.pulled_blocks

    def take(self) -> Blocks:
        """The blocks; their references are the caller's from now on. Raises ConfigError when taken or closed before."""
        self._arrival.take()
        return self.blocks

    def close(self) -> None:
        """Drop the references, unless taken. Idempotent."""
        with contextlib.suppress(InstanceClosed):  # the pool went first, and the references with it
            self._arrival.close()

    def __enter__(self) -> Received:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
