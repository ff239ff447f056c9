"""Feeds an EventIndex from ZeroMQ publishers: one SUB a source, a DEALER for replays, all pumped by one thread.

Knows the sockets only; what a gap or a restart means is `EventFeed`'s.

A publisher tells nobody what it published before it heard of the subscription, which may be after it answered the first
replay, and the last batch it lost shows no gap. So a source that is silent is asked now and then what came last.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from poolweave.errors import ConfigError
from poolweave.index.events.feed import EventFeed, FeedState
from poolweave.index.events.wire import decode_sequence, encode_sequence
from poolweave.types import Tier

_LOG = logging.getLogger(__name__)
_MAX_BATCHES_A_TURN = 256  # of one source before the others have theirs
_MAX_MESSAGE_BYTES = 256 << 20
_FIRST_LOOK_S = 0.2  # of silence after the link was made
_LOOK_S = 5.0  # of silence later


class SourceIndex(Protocol):
    """Where batches end up: an EventIndex, or a scheduler's prompt trees."""

    def add_source(self, name: str, *, can_replay: bool, counts_copies: bool, credited: Tier) -> EventFeed: ...
    def drop_source(self, name: str) -> None: ...


@dataclass(slots=True)
class _Link:
    """One source's sockets."""

    name: str
    feed: EventFeed
    sub: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    replay: zmq.Socket[bytes] | None
    replay_endpoint: str | None
    deadline_s: float | None = None  # of the replay under way
    looking: bool = False  # that replay is a look: the source is credited meanwhile
    look_s: float = math.inf  # when to look next


class KVEventSubscriber:
    """Mutable, driven by one thread that calls `poll`; the index may be read by any.

    `replay_timeout_s` is how long a source may be silent during a replay before it is given up. `clock` is monotonic.
    """

    def __init__(
        self, index: SourceIndex, *, replay_timeout_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._index = index
        self._replay_timeout_s = replay_timeout_s
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._links: dict[str, _Link] = {}

    def connect(
        self,
        source: str,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        counts_copies: bool = False,
        credited: Tier = Tier.HBM | Tier.DRAM,
    ) -> None:
        """Subscribe to `source`; once the link is made, what it told before is asked for.

        Raises ConfigError for a name that is taken or an endpoint that ZeroMQ refuses.
        """
        can_replay = replay_endpoint is not None
        feed = self._index.add_source(source, can_replay=can_replay, counts_copies=counts_copies, credited=credited)
        sub = self._context.socket(zmq.SUB)
        try:
            sub.set_hwm(0)
            sub.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            monitor = sub.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            sub.subscribe(topic.encode())
            sub.connect(endpoint)
        except zmq.ZMQError as error:
            sub.close(linger=0)
            self._index.drop_source(source)
            raise ConfigError(
                f"cannot subscribe to {endpoint!r}: {error}", setting="endpoint", value=endpoint
            ) from error
        self._links[source] = _Link(source, feed, sub, monitor, None, replay_endpoint)
        self._poller.register(sub, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    def disconnect(self, source: str) -> None:
        """Stop listening and forget the source; harmless when there is none of this name."""
        link = self._links.pop(source, None)
        if link is None:
            return
        self._drop_replay(link)
        for socket in (link.sub, link.monitor):
            self._poller.unregister(socket)
        link.sub.disable_monitor()
        link.monitor.close(linger=0)
        link.sub.close(linger=0)
        self._index.drop_source(source)

    def state(self, source: str) -> FeedState | None:
        """How far what is known of `source` can be believed; None when nobody listens to it."""
        link = self._links.get(source)
        return None if link is None else link.feed.state

    def poll(self, timeout_s: float = 0.0) -> int:
        """Wait up to `timeout_s` for events and apply what is there; returns the messages handled."""
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000))))
        handled = 0
        for link in list(self._links.values()):
            if link.monitor in ready:
                handled += self._read_monitor(link)
            if link.sub in ready:
                handled += self._read_batches(link)
            if link.replay is not None and link.replay in ready:
                handled += self._read_replay(link)
            now = self._clock()
            if link.deadline_s is not None and now >= link.deadline_s:
                if not link.looking:
                    _LOG.warning("replay from event source %s timed out", link.name)
                self._end_replay(link, answered=False)
            if link.look_s <= now:
                self._look(link, now)
        return handled

    def close(self) -> None:
        """Idempotent. Without a subscriber its sources are stale: the index forgets them."""
        for source in list(self._links):
            self.disconnect(source)
        self._context.destroy(linger=0)

    def __enter__(self) -> KVEventSubscriber:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def _read_monitor(self, link: _Link) -> int:
        if recv_monitor_message(link.monitor)["event"] == zmq.EVENT_DISCONNECTED:
            link.feed.disconnected()
            link.look_s = math.inf
        else:
            self._ask(link, link.feed.connected())
            link.look_s = self._clock() + _FIRST_LOOK_S
        return 1

    def _read_batches(self, link: _Link) -> int:
        for count in range(_MAX_BATCHES_A_TURN):
            try:
                frames = link.sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return count
            sequence = decode_sequence(frames[1]) if len(frames) == 3 else None
            if sequence is None:
                _LOG.warning("event source %s sent %d frames that are no batch", link.name, len(frames))
                continue
            link.look_s = max(link.look_s, self._clock() + _LOOK_S)
            self._ask(link, link.feed.receive(sequence, frames[2]))
        return _MAX_BATCHES_A_TURN

    def _read_replay(self, link: _Link) -> int:
        assert link.replay is not None
        for count in range(_MAX_BATCHES_A_TURN):
            try:
                frames = link.replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return count
            link.deadline_s = self._clock() + self._replay_timeout_s
            sequence = decode_sequence(frames[2]) if len(frames) == 4 else None
            if sequence is None:
                self._end_replay(link)
                return count + 1
            if link.looking:
                self._ask(link, link.feed.receive(sequence, frames[3]))
                if not link.looking:
                    return count + 1  # it found a gap: what follows comes with the replay
            else:
                link.feed.replayed(sequence, frames[3])
        return _MAX_BATCHES_A_TURN

    def _ask(self, link: _Link, sequence: int | None) -> None:
        """Start the replay that the feed asked for."""
        if sequence is not None:
            _LOG.info("event source %s is replayed from batch %d", link.name, sequence)
            self._request(link, sequence)

    def _look(self, link: _Link, now: float) -> None:
        """Ask a silent source for its last batches, of which all should be known."""
        link.look_s = now + _LOOK_S
        sequence = link.feed.look()
        if sequence is not None and link.replay is None:
            self._request(link, sequence)
            link.looking = True

    def _request(self, link: _Link, sequence: int) -> None:
        """On a fresh socket: answers to an older request must not come in."""
        self._drop_replay(link)
        assert link.replay_endpoint is not None
        link.replay = self._context.socket(zmq.DEALER)
        link.replay.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        link.replay.connect(link.replay_endpoint)
        link.replay.send_multipart((b"", encode_sequence(sequence)))
        self._poller.register(link.replay, zmq.POLLIN)
        link.deadline_s = self._clock() + self._replay_timeout_s

    def _end_replay(self, link: _Link, *, answered: bool = True) -> None:
        looked = link.looking
        self._drop_replay(link)
        if not looked:
            self._ask(link, link.feed.replay_ended(answered=answered))

    def _drop_replay(self, link: _Link) -> None:
        link.deadline_s, link.looking = None, False
        if link.replay is not None:
            self._poller.unregister(link.replay)
            link.replay.close(linger=0)
            link.replay = None
