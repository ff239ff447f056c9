"""The end of a service's process."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import atexit
from poolweave.serving.process.service import end_process
atexit.register(print, "taken apart")
print("done", end="")
end_process(3)
"""


def test_a_process_that_has_closed_all_ends_without_being_taken_apart() -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "done", "")
