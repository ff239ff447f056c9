"""Checks that hold for the whole suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no fault: no deadlines. `make test-slow` asks for the deep profile.
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("deep", deadline=None, max_examples=250)
settings.load_profile("quick")

ROOMS = ("mempool", "index", "transfer", "scheduler", "crosspool_engine")


@pytest.fixture(scope="session", autouse=True)
def no_second_copy_of_a_room() -> Iterator[None]:
    """A bare `import mempool` from the repository's root would load a second copy beside `poolweave.mempool`."""
    yield
    loaded = [name for name in ROOMS if name in sys.modules]
    assert not loaded, f"loaded outside poolweave: {loaded}"


@pytest.fixture(scope="session")
def recorded() -> Callable[[str], Path]:
    """Path of a recorded trace by its file name; the test is skipped where the traces are not at hand."""
    folder = Path(os.environ.get("POOLWEAVE_DATA") or Path(__file__).parents[2] / "shared" / "data")

    def find(name: str) -> Path:
        if not (folder / name).is_file():
            pytest.skip(f"{name} is not at hand: name the folder of the recorded traces in POOLWEAVE_DATA")
        return folder / name

    return find
