"""Pairs of engines over each transport; nothing may be left when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from ref_transfer_world import World, require_nixl


@pytest.fixture(params=["inproc", "shm", "nixl", "tcp"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "nixl":
        require_nixl()
    one = World(request.param)
    yield one
    one.close()


@pytest.fixture
def make_world() -> Iterator[Callable[[str], World]]:
    made: list[World] = []

    def make(listen: str) -> World:
        made.append(World(listen))
        return made[-1]

    yield make
    for one in made:
        one.close()
