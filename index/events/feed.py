"""One source's stream of event batches: finds gaps, repeats and restarts, and says what to ask for. No I/O, no clock.

While the feed is in doubt its source is credited with nothing, and what cannot be repaired is begun anew from what is
known: a source is only ever credited with less than it holds.

    WAITING --batch 0, or a replay--> LIVE --gap, restart, lost connection--> DEGRADED --replay--> LIVE, or PARTIAL
    if it fell short
"""

from __future__ import annotations

import enum

from poolweave.errors import EventsMalformed
from poolweave.index._native import NativeEventStream
from poolweave.index.events.batch_stream import BatchReport, TargetStream

_REBUILD_AFTER = 10_000  # batches between two attempts of a partial source to become complete


class FeedState(enum.Enum):
    WAITING = "waiting"  # nothing heard yet
    LIVE = "live"  # credited with all that the source told since it started, was cleared or sent a snapshot
    PARTIAL = "partial"  # credited with a part of what the source holds
    DEGRADED = "degraded"  # in doubt: credited with nothing


class EventFeed:
    """Mutable, one owner, not thread-safe.

    A method that returns a number asks for a replay from that sequence on: the caller hands every replayed batch to
    `replayed` and then calls `replay_ended`, also when the replay failed. Until then live batches are kept, at most
    `max_kept_bytes`. Without `can_replay` nothing is ever asked for, and a gap makes the source begin anew.
    """

    def __init__(
        self, stream: NativeEventStream | TargetStream, *, can_replay: bool = True, max_kept_bytes: int = 256 << 20
    ) -> None:
        self._stream = stream  # the source's, of which nobody else feeds it
        self._can_replay = can_replay
        self._max_kept_bytes = max_kept_bytes
        self._complete = True
        self._supported = True
        self._away = False
        self._answered = False  # it told once all that it could
        self._asked: int | None = None  # where the replay under way starts
        self._rebuilding = False
        self._rebuild_from = 0
        self._kept: dict[int, bytes] = {}
        self._kept_bytes = 0
        self._newest = -1  # the last live batch kept
        self._torn = False  # what is kept contradicts itself
        self.gaps = self.repeats = self.restarts = self.malformed = 0

    @property
    def state(self) -> FeedState:
        if self._asked is not None or self._away or not self._supported:
            return FeedState.DEGRADED
        if self.batches == 0 and not self._answered:
            return FeedState.WAITING
        return FeedState.LIVE if self._complete else FeedState.PARTIAL

    @property
    def batches(self) -> int:
        """Those that were applied, or were malformed."""
        return self._stream.num_batches

    @property
    def next_sequence(self) -> int:
        return self._stream.next_sequence

    def receive(self, sequence: int, payload: bytes) -> int | None:
        """A batch as published."""
        if self._asked is not None:
            self._torn |= sequence < self._newest
            self._newest = sequence
            self._keep(sequence, payload)
            return None
        expected = self._stream.next_sequence
        if sequence < expected:
            if self._stream.followed(sequence, payload):
                self.repeats += 1
                return None
            self.restarts += 1
            self._begin_anew(expected := 0)
        if sequence > expected:
            self.gaps += 1
            self._keep(sequence, payload)
            return self._ask(self._last)
        was_complete = self._complete
        self._apply(payload)
        if self._complete or not self._can_replay or not (was_complete or self.next_sequence >= self._rebuild_from):
            return None
        self._rebuilding = True
        return self._ask(0)

    def connected(self) -> int | None:
        """A link to the source was made, for the first time or again: what was told meanwhile is missing."""
        self._away = False
        if self.batches == 0 and not self._can_replay:
            self._set_trust()
            return None
        return self._ask(self._last)

    def look(self) -> int | None:
        """Where a look for lost batches starts, without any doubt yet: what it finds goes to `receive` as if published.

        None while a replay is under way or the link is down, and when there is nobody to ask.
        """
        return self._last if self._can_replay and self._asked is None and not self._away else None

    def disconnected(self) -> None:
        """The link was lost: the source is not credited until it is back."""
        self._away = True
        self._forget_kept()
        self._set_trust()

    def replayed(self, sequence: int, payload: bytes) -> None:
        """A batch that was asked for; any order, repeats are harmless."""
        if self._asked is not None:
            self._keep(sequence, payload)

    def replay_ended(self, *, answered: bool = True) -> int | None:
        """What could be replayed was handed over. Not `answered`: the source fell silent."""
        if self._asked is None:
            return None
        if self._torn:
            self._forget_kept()  # two lives of the source are mixed up: ask the present one for everything
            self._begin_anew(0)
            self._asked = 0
            return 0
        batches = sorted(self._kept.items())
        if self.next_sequence > 0 and not self._continues():
            self._begin_anew(0)  # another life of the source, or a gap too long ago to be filled
            if self._asked > 0:
                self._asked = 0  # what came before is needed too
                return 0
        elif self._rebuilding and batches and (batches[0][0] == 0 or b"AllBlocksCleared" in batches[0][1]):
            self._begin_anew(0)
        self._answered |= answered
        self._settle(batches)
        return None

    @property
    def _last(self) -> int:
        """The batch before the one that is expected: with it, a replay shows whether it continues what is known."""
        return max(self.next_sequence - 1, 0)

    def _continues(self) -> bool:
        """The last batch that was applied is the one that the source has under its number."""
        before = self._kept.get(self._last)
        return before is not None and self._stream.followed(self._last, before)

    def _ask(self, sequence: int) -> int | None:
        self._asked = sequence
        self._set_trust()
        if self._can_replay:
            return sequence
        self._begin_anew(min(self._kept, default=self.next_sequence))
        self._settle(sorted(self._kept.items()))
        return None

    def _settle(self, batches: list[tuple[int, bytes]]) -> None:
        """Apply what was kept; at a hole, forget all that came before it."""
        self._asked, self._rebuilding = None, False
        self._forget_kept()
        for sequence, payload in batches:
            if sequence > self.next_sequence:
                self._begin_anew(sequence)
            if sequence == self.next_sequence:
                self._apply(payload)
        self._rebuild_from = self.next_sequence + _REBUILD_AFTER
        self._set_trust()

    def _apply(self, payload: bytes) -> None:
        try:
            report = self._stream.follow(payload)
        except EventsMalformed:
            self.malformed += 1
            self._begin_anew(self.next_sequence + 1)
            return
        if report is not None:
            self._look_at(report)

    def _look_at(self, report: BatchReport) -> None:
        if report.clears:
            self._complete = True
        if report.orphans or report.doubtful or report.conflicts or report.refused:
            self._complete = False
        if report.several_groups:
            self._supported = False
            self._set_trust()

    def _set_trust(self) -> None:
        self._stream.set_trusted(self._asked is None and not self._away and self._supported)

    def _begin_anew(self, sequence: int) -> None:
        self._stream.begin_anew(sequence)
        self._complete = sequence == 0

    def _keep(self, sequence: int, payload: bytes) -> None:
        known = self._kept.get(sequence)
        if known is not None:
            self._torn |= known != payload
            return
        self._kept[sequence] = payload
        self._kept_bytes += len(payload)
        while self._kept_bytes > self._max_kept_bytes:  # the newest matter: with them it begins anew
            self._kept_bytes -= len(self._kept.pop(min(self._kept)))

    def _forget_kept(self) -> None:
        self._kept, self._kept_bytes, self._newest, self._torn = {}, 0, -1, False
