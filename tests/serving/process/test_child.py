"""What is left of a child process: nothing."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from ref_waiting import until

from poolweave.serving.membership.coordinator import CoordinatorConfig
from poolweave.serving.process.child import Child, Program

pytestmark = pytest.mark.multiproc


def test_a_process_that_its_killed_parent_had_stopped_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not see that it is alone, and would keep its memory."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "reference"))
    child = Child(Program("forsaking", "ref_forsaking", CoordinatorConfig()))
    told: list[str] = []
    until(lambda: told or told.extend(child.new_lines()), "it says whom it stopped")
    left = psutil.Process(int(told[0]))
    until(lambda: left.status() == psutil.STATUS_STOPPED, "that one stands")
    child.kill()
    child.close()
    until(lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE, "it is gone")
