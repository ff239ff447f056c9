"""Pairs of engines over each transport; nothing may be left when a test ends."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ref_gpu import Communicator, Nccl, one_gpu
from ref_transfer_world import World, require_nixl

from poolweave.transfer import nccl_lane


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A GPU and NCCL, or what stands in for them; nothing of either may be left."""
    with one_gpu() as stand_in:
        monkeypatch.setattr(nccl_lane, "load_nccl", lambda: Nccl)
        yield stand_in
        gc.collect()
        assert stand_in.stand_in_used() == 0
        assert Communicator.live == 0


@pytest.fixture(params=["inproc", "shm", "nccl", "nixl", "tcp"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "nixl":
        require_nixl()
    if request.param == "nccl":
        request.getfixturevalue("gpu")
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
