"""Doors over fake instances, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from ref_door import World
from ref_words import save_words

from poolweave.types import Role


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_words(tmp_path_factory.mktemp("models") / "echo")


@pytest.fixture(scope="module")
def world(words: Path) -> Iterator[World]:
    """One prefill and one decode instance; for tests that leave them as they were."""
    made = World(words, (Role.PREFILL, Role.DECODE))
    yield made
    made.close()


@pytest.fixture
def make_world(words: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(*roles: Role, **door: Any) -> World:
        worlds.append(World(words, roles, **door))
        return worlds[-1]

    yield make
    for made in worlds:
        made.close()
