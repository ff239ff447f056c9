"""Worker processes without work: they sleep."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from ref_decode import decode, mixed
from ref_waiting import until

from poolweave.crosspool_engine import DecodeEngine

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(600)]


def run_ns(pid: int) -> int:
    """Nanoseconds that a process's threads had a core."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


def busiest(pids: Sequence[int]) -> float:
    """The greatest part of a core that one of them took in the half second after the call."""
    before, start = [run_ns(pid) for pid in pids], time.monotonic_ns()
    threading.Event().wait(0.5)
    return max(run_ns(pid) - then for pid, then in zip(pids, before, strict=True)) / (time.monotonic_ns() - start)


@pytest.mark.parametrize("lowered", [True, False], ids=["lowered", "hosted"])
def test_idle_worker_processes_cost_no_cpu(engine: DecodeEngine, lowered: bool) -> None:
    """With six models active, after requests of all of them."""
    engine.set_control(lowered=lowered, in_flight=3)
    decode(engine, mixed())
    pids = engine.worker_pids()
    assert all(run_ns(pid) > 0 for pid in pids)
    until(lambda: busiest(pids) < 0.02, "workers without a batch sleep")
