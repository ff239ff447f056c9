"""A source over a bad channel: whatever is lost, repeated, late or restarted, it is never credited with too much."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ref_event_source import Path, TrueSource

from poolweave.index.events import EventIndex, FeedState

paths = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
ALL_PATHS = list(itertools.product((0, 1), repeat=4))


class BadChannel(RuleBasedStateMachine):
    @initialize(counts_copies=st.booleans(), kept=st.sampled_from([3, 1000]), can_replay=st.booleans())
    def start(self, counts_copies: bool, kept: int, can_replay: bool) -> None:
        self.source = TrueSource(kept)
        self.index = EventIndex(block_tokens=1)
        self.feed = self.index.add_source("s", can_replay=can_replay, counts_copies=counts_copies)
        self.queue: list[tuple[int, bytes]] = []
        self.sent: list[tuple[int, bytes]] = []
        self.asked: int | None = None
        self.connected = True
        self.note(self.feed.connected())

    def note(self, asked: int | None) -> None:
        self.asked = asked if asked is not None else self.asked

    def send(self, batch: tuple[int, bytes] | None) -> None:
        if batch is not None and self.connected:
            self.queue.append(batch)

    @rule(path=paths, again=st.booleans())
    def store(self, path: Path, again: bool) -> None:
        self.send(self.source.store(path, again))

    @precondition(lambda self: self.source.copies)
    @rule(which=st.integers(0, 30))
    def remove(self, which: int) -> None:
        self.send(self.source.remove(sorted(self.source.copies)[which % len(self.source.copies)]))

    @rule()
    def clear(self) -> None:
        self.send(self.source.clear())

    @precondition(lambda self: self.queue)
    @rule()
    def deliver(self) -> None:
        self.sent.append(self.queue.pop(0))
        self.note(self.feed.receive(*self.sent[-1]))

    @precondition(lambda self: self.queue)
    @rule()
    def lose(self) -> None:
        self.queue.pop(0)

    @precondition(lambda self: len(self.queue) > 1)
    @rule()
    def overtake(self) -> None:
        self.queue[:2] = self.queue[1::-1]

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 30))
    def repeat(self, which: int) -> None:
        self.queue.insert(0, self.sent[-1 - which % min(3, len(self.sent))])

    @rule()
    def restart(self) -> None:
        """The process dies: what was on its way arrives or not, the link breaks and is made again later."""
        self.source.restart()
        self.sent.clear()
        self.disconnect()

    @precondition(lambda self: self.connected)
    @rule(path=paths)
    def restart_in_place(self, path: Path) -> None:
        """The sequence is back at 0 with no sign of a lost link."""
        self.source.restart()
        self.queue.clear()
        self.sent.clear()
        self.send(self.source.store(path))
        self.deliver()

    @precondition(lambda self: self.connected)
    @rule()
    def disconnect(self) -> None:
        self.queue.clear()
        self.connected = False
        self.feed.disconnected()

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        self.connected = True
        self.note(self.feed.connected())

    @precondition(lambda self: self.asked is not None)
    @rule(fails=st.sampled_from([False, False, True]))
    def answer_replay(self, fails: bool) -> None:
        start, self.asked = self.asked, None
        for sequence, payload in [] if fails else self.source.replay(start):
            self.feed.replayed(sequence, payload)
        self.note(self.feed.replay_ended())

    def up_to_date(self) -> bool:
        return self.connected and self.asked is None and self.feed.next_sequence == len(self.source.batches)

    @invariant()
    def never_more(self) -> None:
        self.index.check()
        if self.feed.state is FeedState.DEGRADED:
            assert not any(self.index.match(path) for path in ALL_PATHS)
        elif self.up_to_date():
            exact = self.feed.state is FeedState.LIVE
            for path in ALL_PATHS:
                credited, true = self.index.match(path).get("s", 0), self.source.leading(path)
                assert credited == true if exact else credited <= true

    def teardown(self) -> None:
        """A good channel again, and a source that tells all it holds: the index equals the truth."""
        self.queue.clear()
        self.connected = True
        self.feed.disconnected()
        self.note(self.feed.connected())
        held = sorted(self.source.copies, key=len)
        whole = [path for path in held if all(path[: i + 1] in held for i in range(len(path)))]
        batches = [self.source.clear(), *(self.source.store(path) for path in whole)]
        while self.asked is not None:
            self.answer_replay(False)
        for batch in filter(None, batches):
            self.note(self.feed.receive(*batch))
        while self.asked is not None:
            self.answer_replay(False)
        assert self.feed.state in (FeedState.LIVE, FeedState.PARTIAL)
        for path in ALL_PATHS:
            assert self.index.match(path).get("s", 0) == self.source.leading(path)


TestBadChannel = BadChannel.TestCase
TestBadChannel.settings = settings(stateful_step_count=40)
