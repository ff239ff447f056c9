"""The door's process: what is wrong with its settings is known before it says that it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from poolweave.errors import ConfigError
from poolweave.serving.door.config import DoorConfig
from poolweave.serving.door.server import DoorServer


def test_a_registry_that_is_none_is_known_before_it_serves(words: Path) -> None:
    with pytest.raises(ConfigError, match="registry='carrier-pigeon://loft' is none of tcp://"):
        DoorServer(DoorConfig(registry="carrier-pigeon://loft", model=str(words), listen="127.0.0.1:0"))
