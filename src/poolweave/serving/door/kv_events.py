"""Instances' KV events into the scheduler's prompt trees: what they held before this door came, and what they evict."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import dataclass
from typing import Any

import msgspec

from poolweave.errors import EventsMalformed, PoolweaveError
from poolweave.index.events import EventFeed, FeedState, KVEventSubscriber, TargetStream
from poolweave.index.events.wire import AllBlocksCleared, BlockRemoved, BlockStored
from poolweave.scheduler.holdings import Holdings
from poolweave.serving.control.messages import Welcome
from poolweave.types import Tier

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_AGAIN_S = 1.0  # after what nobody expected
_decode = msgspec.msgpack.Decoder(tuple[float, list[BlockStored | BlockRemoved | AllBlocksCleared], Any]).decode


class Listener:
    """Hears the instances that publish. Used from one event loop, which `run` gives a little of its time."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._subscriber = KVEventSubscriber(EventSources(holdings))

    def connect(self, name: str, welcome: Welcome) -> None:
        """Hear an instance that the scheduler knows, from all that it holds now on."""
        if welcome.events is None:
            return
        try:
            self._subscriber.connect(name, welcome.events, welcome.replay)
        except PoolweaveError as error:
            logger.warning("%s is not heard: %s", name, error)

    def disconnect(self, name: str) -> None:
        """Harmless when it was not heard."""
        self._subscriber.disconnect(name)

    def state(self, name: str) -> str:
        """How far an instance's events are believed: a FeedState's word, or "none" for one that publishes none."""
        state = self._subscriber.state(name)
        if state is None:
            return "none"
        return (state if self._holdings.believes(name) else FeedState.DEGRADED).value

    async def run(self) -> None:
        """Take what came, again and again, until cancelled."""
        while True:
            wait_s = _POLL_S
            try:
                self._subscriber.poll()
            except Exception:
                logger.exception("instances could not be heard; they are again")
                wait_s = _AGAIN_S
            await asyncio.sleep(wait_s)

    def close(self) -> None:
        """Idempotent."""
        self._subscriber.close()


@dataclass(slots=True)
class _Report:
    """What an event feed asks of a batch; see EventReport. The trees judge doubts themselves."""

    clears: int = 0
    orphans: int = 0
    doubtful: int = 0
    conflicts: int = 0
    refused: int = 0
    several_groups: bool = False


class EventSources:
    """A scheduler's prompt trees as a KVEventSubscriber sees them: a feed an instance, which the scheduler knows."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings

    def add_source(self, name: str, *, can_replay: bool, counts_copies: bool, credited: Tier) -> EventFeed:
        return EventFeed(TargetStream(_Tree(name, self._holdings)), can_replay=can_replay)

    def drop_source(self, name: str) -> None:
        """The scheduler forgets an instance that is gone by itself."""


class _Tree:
    """One instance's batches, event by event."""

    def __init__(self, name: str, holdings: Holdings) -> None:
        self._name = name
        self._holdings = holdings

    def apply(self, payload: bytes) -> _Report:
        """Raises EventsMalformed; its feed then forgets what the instance told before."""
        try:
            _, events, _ = _decode(payload)
            return self._enter(events)
        except (msgspec.MsgspecError, ValueError, TypeError, ArithmeticError) as error:  # ConfigError is a ValueError
            logger.warning("a batch of %s makes no sense: %s", self._name, error)
            raise EventsMalformed(f"a batch of {self._name} makes no sense: {error}", offset=0) from error

    def _enter(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> _Report:
        report = _Report()
        for event in events:
            if isinstance(event, BlockStored):
                self._holdings.stored(self._name, event, self._namespace(event))
            elif isinstance(event, BlockRemoved):
                self._holdings.removed(self._name, event)
            else:
                self._holdings.cleared(self._name)
                report.clears += 1
        return report

    def clear(self) -> None:
        self._holdings.cleared(self._name)

    def set_trusted(self, trusted: bool) -> None:
        """In doubt, the trees credit it with less; what it said before stays believed."""
        if trusted:
            self._holdings.regained_events(self._name)
        else:
            self._holdings.lost_events(self._name)

    def _namespace(self, event: BlockStored) -> int:
        """A pool gives the digest of an identity other than its own default as the salt, vLLM its parts."""
        if event.cache_salt is not None:
            return self._holdings.namespace_of(bytes.fromhex(event.cache_salt))
        if event.lora_name is None and not any(event.extra_keys or ()):
            return 0
        parts = msgspec.msgpack.encode((event.lora_name, next(iter(event.extra_keys or ()), None)))
        return self._holdings.namespace_of(hashlib.blake2b(parts, digest_size=16).digest())
