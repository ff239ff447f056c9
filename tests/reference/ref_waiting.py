"""Waiting for a state of another thread or process, in every test by the same rule."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 90.0  # for what takes milliseconds on a machine that has time; less than a test's own limit


def until(true: Callable[[], Any], what: str = "what is waited for", seconds: float = PATIENCE_S) -> None:
    """Returns when `true()` is; fails the test when it is not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        threading.Event().wait(0.005)
