"""Prompts whose KV did not reach the decode instance: it computes them again, counts that and says so once."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger(__name__)


class Recomputes:
    """What one decode instance computed again. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    def note(self, request: str, why: str) -> None:
        """Once a request."""
        with self._lock:
            self._count += 1
        logger.warning("request %s: its prompt is computed again, the KV did not come: %s", request, why)
