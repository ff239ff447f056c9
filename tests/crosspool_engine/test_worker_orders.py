"""A worker's order-taking: what an activation left goes back to the system before the host hears how it went."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import threading
import weakref
from collections.abc import Iterator

import pytest

from poolweave.crosspool_engine.worker import take_orders
from poolweave.crosspool_engine.worker_messages import Activate, Deactivate, Done, Failed, receive_answer, send
from poolweave.errors import ConfigError


class Weights:
    """A cycle, as modules of a model are."""

    def __init__(self) -> None:
        self.owner = self


class Half:
    def __init__(self) -> None:
        self.made: list[weakref.ref[Weights]] = []
        self.served: dict[int, Weights] = {}

    def activate(self, order: Activate) -> None:
        weights = Weights()
        self.made.append(weakref.ref(weights))
        if order.path == "spoilt":
            raise ConfigError("norm holds NaN", setting="norm")
        self.served[order.index] = weights

    def deactivate(self, index: int) -> None:
        self.served.pop(index, None)


@pytest.fixture
def no_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And no log: pytest keeps its records, whose tracebacks keep what failed."""
    monkeypatch.setattr(logging.getLogger("poolweave.crosspool_engine.worker"), "disabled", True)
    gc.disable()
    yield
    gc.enable()


def test_memory_of_a_failed_and_of_a_deactivated_model_is_back_before_the_answer(no_collector: None) -> None:
    half = Half()
    ours, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=take_orders, args=(half, theirs))
    thread.start()
    try:
        for number in range(3):
            send(ours, Activate(0, "spoilt", "float32"))
            answer = receive_answer(ours)
            assert answer == Failed("ConfigError", "norm holds NaN")
            assert half.made[number]() is None
        send(ours, Activate(1, "fine", "float32"))
        assert receive_answer(ours) == Done()
        assert half.made[3]() is not None
        send(ours, Deactivate(1))
        assert receive_answer(ours) == Done()
        assert half.made[3]() is None
    finally:
        ours.close()
        thread.join()
