"""Follows a registry's configurations in a thread of its own and tells what changed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from poolweave.errors import PoolweaveError
from poolweave.scheduler.configuration import Configuration, Difference, Roster
from poolweave.serving.membership.registry import Registry

logger = logging.getLogger(__name__)

_WATCH_S = 10.0
_RETRY_S = 0.2


class Follower:
    """Calls `changed(difference)` in its thread until `close`. The registry is its own: it closes it."""

    def __init__(self, registry: Registry, changed: Callable[[Difference], None]) -> None:
        self._registry = registry
        self._changed = changed
        self._roster = Roster()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; nothing is called afterwards. Idempotent."""
        self._ending.set()
        self._registry.close()
        self._thread.join()

    def _run(self) -> None:
        seen: Configuration | None = None
        while not self._ending.is_set():
            try:
                configuration = self._registry.watch(seen, _WATCH_S)
            except Exception as error:
                if not isinstance(error, PoolweaveError):
                    logger.exception("the registry answered what cannot be read; it is asked again")
                logger.debug("no configuration: %s", error)
                self._ending.wait(_RETRY_S)
                continue
            if configuration is None or self._ending.is_set():
                continue
            seen = configuration
            difference = self._roster.apply(configuration)
            if difference:
                self._tell(difference)

    def _tell(self, difference: Difference) -> None:
        try:
            self._changed(difference)
        except Exception:
            logger.exception("could not follow a change of the membership")
