"""Directories that are made once and kept in the user's cache: whole or not there, also when processes die."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from poolweave.errors import ConfigError

_log = logging.getLogger(__name__)


def kept_directory(name: str, make: Callable[[Path], None]) -> Path:
    """The directory `name` in the cache; at the first call `make` fills an empty one that then becomes it.

    Processes that call at once wait for the one that makes it; a killed one leaves nothing that is taken for whole.
    Raises ConfigError when the cache directory cannot be written, and what `make` raises.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "poolweave"
    target = cache / name
    if not target.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _exclusive(cache / f"{name}.lock"):
                if not target.is_dir():
                    _make(target, make)
        except OSError as error:
            raise ConfigError(
                f"cannot keep {name} in {cache}: {error}; set XDG_CACHE_HOME to a writable directory with 2 GiB free",
                setting="XDG_CACHE_HOME",
                value=str(cache),
            ) from error
    return target


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process
        yield


def _make(target: Path, make: Callable[[Path], None]) -> None:
    """Under another name, renamed when whole. The caller holds the lock: one writer at a time."""
    _log.info("making %s", target)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    make(partial)
    partial.rename(target)
