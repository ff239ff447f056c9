"""A source's batches in order, for a target written in Python; NativeEventStream is the same over the native index."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import xxhash

_REMEMBERED = 4096  # batches whose digests tell a repeat from a restart


class BatchReport(Protocol):
    """What a batch did, as far as a feed asks; EventReport has more."""

    @property
    def clears(self) -> int: ...
    @property
    def orphans(self) -> int: ...
    @property
    def doubtful(self) -> int: ...
    @property
    def conflicts(self) -> int: ...
    @property
    def refused(self) -> int: ...
    @property
    def several_groups(self) -> bool: ...


class FeedTarget(Protocol):
    """What a stream acts on: the holdings of one source."""

    def apply(self, payload: bytes) -> BatchReport: ...
    def clear(self) -> None: ...
    def set_trusted(self, trusted: bool) -> None: ...


class TargetStream:
    """Mutable, one owner. As NativeEventStream, but every batch's report is given."""

    def __init__(self, target: FeedTarget) -> None:
        self._target = target
        self._digests: OrderedDict[int, int] = OrderedDict()
        self.next_sequence = 0
        self.num_batches = 0

    def follow(self, payload: bytes) -> BatchReport:
        self.num_batches += 1
        report = self._target.apply(payload)
        self._digests[self.next_sequence] = _digest(payload)
        if len(self._digests) > _REMEMBERED:
            self._digests.popitem(last=False)
        self.next_sequence += 1
        return report

    def followed(self, sequence: int, payload: bytes) -> bool:
        return self._digests.get(sequence) == _digest(payload)

    def begin_anew(self, sequence: int) -> None:
        self._target.clear()
        self._digests.clear()
        self.next_sequence = sequence

    def set_trusted(self, trusted: bool) -> None:
        self._target.set_trusted(trusted)


def _digest(payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload)
