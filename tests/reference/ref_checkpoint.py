"""A torch model's directory, as the workers read it, for as long as a test needs it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from poolweave.crosspool_engine.models import Checkpoint


@contextmanager
def saved_checkpoint(model: Any, dtype: str = "float32") -> Iterator[Checkpoint]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        yield Checkpoint(folder, dtype)
