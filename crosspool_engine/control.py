"""Who moves batches from stage to stage: the seam between an engine and its two kinds of control.

Lowered: workers among themselves, the host only composes batches. Hosted: the host, one message a stage. Both run the
same native executors. Source: CrossPool control lowering and its ablation.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from typing import Protocol

from poolweave.crosspool_engine.running import Running


class SlotTurn(enum.IntEnum):
    """Whose a slot of the board is; the native `Turn`."""

    IDLE = 0
    READY = 1
    ATTENTION = 2
    HOST = 3
    FFN = 4  # of rank 0; rank r's is FFN + r, on its way to and from another host FFN + 8 + r


class SeatFinish(enum.IntEnum):
    """Why a seat's request is over; the native `Finish`."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    BROKEN = 3


class Control(Protocol):
    """One driver, not thread-safe."""

    def place(self, running: Running) -> None:
        """Let a request whose seat and KV are ready take part."""
        ...

    def collect(self, timeout_s: float) -> list[Running]:
        """Move things on, or wait up to `timeout_s` for them to. -> requests that take part no more: over or cancelled.

        Raises WorkerLost when a worker that was needed died.
        """
        ...

    def evacuate(self, doomed: Collection[Running], dead: Callable[[], Collection[int]]) -> None:
        """Take these requests off the board after a worker died; `dead` tells the places of those that have.

        They are all that run of a model on one of its replicas. Waits for what living workers still have in hand of
        them, a stage at most.
        """
        ...
