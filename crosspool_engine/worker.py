"""A worker process: one half of the models, run natively over the board until the host ends it.

    python -m poolweave.crosspool_engine.worker '<WorkerSpec as JSON>'

The main thread stays in the native loop, where it sleeps while no slot is the workers'; a second one takes orders,
with control lowering off stages among them: then no slot is, so only one of the two ever computes. A host that is gone
ends both.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
import threading
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec

from poolweave.crosspool_engine._native import Board
from poolweave.crosspool_engine.worker_messages import (
    Activate,
    Answer,
    Deactivate,
    Done,
    Failed,
    Locate,
    Order,
    Pages,
    Step,
    WorkerSpec,
    receive_order,
    send,
)
from poolweave.errors import PoolweaveError

_log = logging.getLogger(__name__)


class Half(Protocol):
    """What a role does for the loop above it."""

    def activate(self, order: Activate) -> None: ...
    def deactivate(self, index: int) -> None: ...
    def change_pages(self, order: Pages) -> None: ...
    def locate(self, order: Locate) -> tuple[int, ...]: ...
    def step(self, slot: int) -> None: ...
    def run(self) -> None: ...


def main(argument: str) -> int:
    """Serve until the board is aborted or the host is gone. -> exit status"""
    spec = msgspec.json.decode(argument, type=WorkerSpec)
    if spec.core is not None:
        os.sched_setaffinity(0, {spec.core})
    board = Board.attach(spec.board_fd)
    channel = Connection(spec.channel_fd)
    try:
        half = _half(board, spec)
    except PoolweaveError as error:
        send(channel, Failed(type(error).__name__, str(error)))
        return 1
    send(channel, Done())  # up, and ready for orders
    threading.Thread(target=_take_orders_then_exit, args=(half, channel), daemon=True).start()
    half.run()
    return 0


def _half(board: Board, spec: WorkerSpec) -> Half:
    if spec.remote is not None:
        from poolweave.crosspool_engine.remote_half import RemoteHalf

        return RemoteHalf(board, spec)
    from poolweave.crosspool_engine.models.halves import AttentionHalf, FfnHalf

    return FfnHalf(board, spec) if spec.arena_fds is None else AttentionHalf(board, spec)


def _take_orders_then_exit(half: Half, channel: Connection) -> None:
    take_orders(half, channel)
    os._exit(0)  # the host is gone: the native loop has nobody to work for


def take_orders(half: Half, channel: Connection) -> None:
    """Carry out what comes until the host is gone."""
    while True:
        try:
            order = receive_order(channel)
        except (EOFError, OSError):
            return
        try:
            answer: Answer = _carry_out(half, order)
        except Exception as error:  # noqa: BLE001 - the boundary: the host gets it and decides
            _log.warning("order %s failed", type(order).__name__, exc_info=True)
            answer = Failed(type(error).__name__, str(error))
        if isinstance(order, (Activate, Deactivate)):
            _return_memory()
        try:
            send(channel, answer)
        except OSError:
            return


def _carry_out(half: Half, order: Order) -> Done:
    values: tuple[int, ...] = ()
    if isinstance(order, Step):
        half.step(order.slot)
    elif isinstance(order, Activate):
        half.activate(order)
    elif isinstance(order, Deactivate):
        half.deactivate(order.index)
    elif isinstance(order, Pages):
        half.change_pages(order)
    else:
        values = half.locate(order)
    return Done(values)


def _return_memory() -> None:
    """To the system, what loading or unloading a model left: cycles of its modules, and free pages of the heap."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the order-taking thread may still hold models: there is nothing to tear down in order
