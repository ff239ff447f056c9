"""The KV side's stand-in for a weights rank on another host: orders and hidden states cross by TCP."""

from __future__ import annotations

import os
import socket
import threading
from multiprocessing.connection import Connection

from poolweave.crosspool_engine._native import Board, HiddenLink
from poolweave.crosspool_engine.remote_messages import Hello, parse_address, send_hello
from poolweave.crosspool_engine.worker_messages import (
    Activate,
    Deactivate,
    Locate,
    Order,
    Pages,
    WorkerSpec,
    receive_answer,
    send,
    values_of,
)
from poolweave.errors import ConfigError, PoolweaveError, WorkerLost

_CONNECT_S = 30.0


class RemoteHalf:
    """As FfnHalf, for a rank that `spec.remote` serves. Raises WorkerLost when nobody answers there."""

    def __init__(self, board: Board, spec: WorkerSpec) -> None:
        assert spec.remote is not None
        self._name = f"ffn-{spec.rank} at {spec.remote.address}"
        address = parse_address(spec.remote.address)
        try:
            orders = socket.create_connection(address, timeout=_CONNECT_S)
            data = socket.create_connection(address, timeout=_CONNECT_S)
        except OSError as error:
            raise WorkerLost(f"no FFN host answers: {self._name}: {error}", worker=self._name) from error
        for connection in (orders, data):
            connection.settimeout(None)
        self._orders = Connection(orders.detach())
        send_hello(self._orders, Hello(rank=spec.rank, sizes=spec.remote.sizes, kernels=spec.kernels))
        self._link = HiddenLink(board, data.detach(), spec.rank, False)
        self._receive()  # it is up

    def activate(self, order: Activate) -> None:
        self._call(order)

    def deactivate(self, index: int) -> None:
        self._call(Deactivate(index))

    def change_pages(self, order: Pages) -> None:
        raise ConfigError("an FFN rank holds no KV", setting="index", value=order.index)

    def locate(self, order: Locate) -> tuple[int, ...]:
        raise ConfigError("an FFN rank holds no KV", setting="index", value=order.index)

    def step(self, slot: int) -> None:
        try:
            self._link.step(slot)
        except (OSError, PoolweaveError):
            os._exit(1)  # the other host is gone: the engine sees this worker die

    def run(self) -> None:
        """Until the connection ends or the board is aborted: then this process is done."""
        threading.Thread(target=self._receive_slots, daemon=True).start()
        self._link.send()

    def _receive_slots(self) -> None:
        self._link.receive()
        os._exit(1)  # the other host is gone: the engine sees this worker die

    def _call(self, order: Order) -> None:
        try:
            send(self._orders, order)
        except OSError as error:
            raise WorkerLost(f"{self._name} is gone", worker=self._name) from error
        self._receive()

    def _receive(self) -> None:
        try:
            answer = receive_answer(self._orders)
        except (EOFError, OSError) as error:
            raise WorkerLost(f"{self._name} is gone", worker=self._name) from error
        values_of(self._name, answer)
