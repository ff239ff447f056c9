"""Checks that hold for the whole suite."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("poolweave", deadline=None)  # a busy machine is no fault
settings.load_profile("poolweave")

ROOMS = ("mempool", "index", "transfer", "scheduler", "crosspool_engine")


@pytest.fixture(scope="session", autouse=True)
def no_second_copy_of_a_room() -> Iterator[None]:
    """A bare `import mempool` from the repository's root would load a second copy beside `poolweave.mempool`."""
    yield
    loaded = [name for name in ROOMS if name in sys.modules]
    assert not loaded, f"loaded outside poolweave: {loaded}"
