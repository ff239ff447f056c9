"""Engines of one process: a copy from memory to memory, also for stores whose memory has no descriptor.

The engines meet in an Exchange that their configs share. A sender's revoke() waits for the copies under way, so its
memory may be unmapped right after its engine is closed.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Sequence

from poolweave.errors import ConfigError, ProtocolError
from poolweave.transfer._native import Outcome
from poolweave.transfer.layout import KVLayout
from poolweave.transfer.messages import Hello
from poolweave.transfer.offers import OpenOffer
from poolweave.transfer.one_sided import OneSided
from poolweave.transfer.transport import Home, PullSlice, Source
from poolweave.transfer.transports.shm import MappedSource


class Exchange:
    """Where the engines of one process find each other's memory. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._homes: dict[tuple[str, int], Home] = {}
        self._readers: Counter[tuple[str, int, int]] = Counter()  # by instance, epoch and offer

    def join(self, home: Home) -> None:
        with self._changed:
            self._homes[home.instance, home.epoch] = home

    def leave(self, home: Home) -> None:
        """After it returns nobody here reads the memory of `home`. Idempotent."""
        with self._changed:
            self._homes.pop((home.instance, home.epoch), None)
            self._changed.wait_for(lambda: not any(key[:2] == (home.instance, home.epoch) for key in self._readers))

    def find(self, instance: str, epoch: int) -> Home:
        """Raises ProtocolError when no such engine has joined."""
        with self._changed:
            home = self._homes.get((instance, epoch))
        if home is None:
            raise ProtocolError(f"{instance} did not join this engine's exchange: give both the same one")
        return home

    def begin(self, home: Home, offer: int) -> bool:
        """A copy begins; False when the offer's lease is over."""
        with self._changed:
            if (home.instance, home.epoch) not in self._homes or not home.leases.is_open(offer):
                return False
            self._readers[home.instance, home.epoch, offer] += 1
            return True

    def end(self, home: Home, offer: int) -> None:
        key = (home.instance, home.epoch, offer)
        with self._changed:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]
            self._changed.notify_all()

    def drain(self, home: Home, offer: int) -> None:
        """Wait until no copy of the offer is under way; its lease word has been cleared, so none begins."""
        with self._changed:
            self._changed.wait_for(lambda: (home.instance, home.epoch, offer) not in self._readers)


class InprocSource(Source):
    """Reads the sender's memory where it lies."""

    is_instant = True

    def __init__(self, exchange: Exchange, home: Home, threads: int) -> None:
        self._exchange = exchange
        self._home = home
        self._mapped = MappedSource(home.memory, home.leases.words, threads)

    def pull(self, slice_: PullSlice) -> Outcome:
        offer = slice_.offer.offer
        if not self._exchange.begin(self._home, offer):
            return Outcome.REVOKED
        try:
            return self._mapped.pull(slice_)
        finally:
            self._exchange.end(self._home, offer)

    def close(self) -> None:
        self._mapped.close()


class InprocTransport(OneSided):
    """Needs `exchange` in the settings. Raises ConfigError without."""

    def __init__(self, home: Home) -> None:
        if not isinstance(home.exchange, Exchange):
            raise ConfigError("inproc needs an Exchange that the engines share", setting="exchange")
        super().__init__(home)
        self._exchange = home.exchange
        self._exchange.join(home)

    def introduce(self, connection: socket.socket) -> tuple[str, tuple[int, ...]]:
        return "", ()

    def attach(self, hello: Hello, fds: Sequence[int], layout: KVLayout) -> InprocSource:
        for fd in fds:
            os.close(fd)
        home = self._exchange.find(hello.instance, hello.epoch)
        return InprocSource(self._exchange, home, self._home.limits.copy_threads)

    def revoke(self, offer: OpenOffer) -> None:
        self._exchange.drain(self._home, offer.number)

    def close(self) -> None:
        self._exchange.leave(self._home)
