"""Shared memory: the sender's memfds mapped read-only by the receiver, one copy, no sender CPU.

The lease word is read after each piece is copied: while it stands, the sender has not taken the blocks back.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import numpy as np

from poolweave.errors import ConfigError, ProtocolError
from poolweave.transfer._native import Outcome, copy_blocks
from poolweave.transfer.layout import KVLayout
from poolweave.transfer.leases import TABLE_BYTES, slot_of
from poolweave.transfer.messages import Hello
from poolweave.transfer.one_sided import OneSided
from poolweave.transfer.regions import Memory, PeerMemory, map_bytes
from poolweave.transfer.store import MappedPeer
from poolweave.transfer.transport import Home, PullSlice, Source
from poolweave.types import UInt64Array


class MappedSource(Source):
    """Reads blocks through a mapping of the sender's memory and of its lease words."""

    is_instant = True

    def __init__(self, memory: Memory, words: UInt64Array, threads: int) -> None:
        self._mapped: tuple[Memory, UInt64Array] | None = (memory, words)
        self._threads = threads

    @property
    def mapped(self) -> MappedPeer | None:
        if self._mapped is None:
            return None
        memory, words = self._mapped
        return MappedPeer(memory.tiers, words, memory)

    def pull(self, slice_: PullSlice) -> Outcome:
        mapped = self._mapped  # kept by this frame: close() cannot unmap under the copy
        if mapped is None:
            return Outcome.REVOKED
        memory, words = mapped
        offer, first, count = slice_.offer, slice_.first, slice_.target.num_blocks
        tiers = np.frombuffer(offer.tiers, np.uint8)[first : first + count]
        slots = np.frombuffer(offer.slots, np.int32)[first : first + count]
        source = memory.extents(tiers, slots, slice_.windows)
        return copy_blocks(
            source, slice_.target, 0, count, self._threads, words, slot_of(offer.offer), offer.offer,
            slice_.abort, slice_.hashes,
        )  # fmt: skip

    def close(self) -> None:
        self._mapped = None


class ShmTransport(OneSided):
    """Needs stores whose regions have descriptors. Raises ConfigError without."""

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        if any(fd < 0 for fd in home.memory.fds):
            raise ConfigError(
                "a tier in a shared arena cannot be mapped whole: listen on arena, tcp or inproc", setting="listen"
            )

    def introduce(self, connection: socket.socket) -> tuple[str, tuple[int, ...]]:
        return "", (*self._home.memory.fds, self._home.leases.fd)

    def attach(self, hello: Hello, fds: Sequence[int], layout: KVLayout) -> MappedSource:
        if len(fds) != len(hello.spaces) + 1:
            for fd in fds:
                os.close(fd)
            raise ProtocolError(f"{len(fds)} descriptors came for {len(hello.spaces)} tiers and a lease table")
        try:
            words = map_bytes(fds[-1], TABLE_BYTES).view(np.uint64)
        except BaseException:
            for fd in fds[:-1]:
                os.close(fd)
            raise
        memory = PeerMemory(layout, hello.spaces, fds[:-1])
        return MappedSource(memory, words, self._home.limits.copy_threads)
