"""Shelf: what peers may read now, by stream, where a reader copies it out while it stands."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from poolweave.transfer._native import Extents


@dataclass(slots=True)
class Published:
    """The blocks of a stream, and how many read them."""

    extents: Extents
    nonce: int
    readers: int = 0


class Shelf:
    """What may be read now, by stream. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._streams: dict[int, Published] = {}

    def put(self, stream: int, extents: Extents, nonce: int) -> None:
        with self._changed:
            self._streams[stream] = Published(extents, nonce)

    def take_down(self, streams: Sequence[int]) -> None:
        """After it returns nobody reads them. Idempotent."""
        with self._changed:
            gone = [one for one in (self._streams.pop(stream, None) for stream in streams) if one is not None]
            self._changed.wait_for(lambda: not any(one.readers for one in gone))

    def begin(self, stream: int, nonce: int) -> Published | None:
        """It may be read until end(); None when it is not there."""
        with self._changed:
            found = self._streams.get(stream)
            if found is None or found.nonce != nonce:
                return None
            found.readers += 1
            return found

    def end(self, one: Published) -> None:
        with self._changed:
            one.readers -= 1
            self._changed.notify_all()
