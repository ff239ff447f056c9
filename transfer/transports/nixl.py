"""NIXL: the receiver reads the sender's registered memory with its agent; the way over RDMA, NVLink and GPUDirect.

Needs the optional package `nixl`. The lease table is registered too: its word is read after the blocks, so what was
read while it stood is valid. The sender's Python does nothing. All of a tier's region is registered at once: over RDMA
give tiers a maximum size, because it is pinned.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import functools
import importlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from poolweave.errors import ConfigError, PoolweaveError, ProtocolError, TransferFailed
from poolweave.transfer._native import Abort, Extents, Outcome, hash_blocks
from poolweave.transfer.layout import KVLayout
from poolweave.transfer.leases import TABLE_BYTES, slot_of
from poolweave.transfer.messages import Hello, decode
from poolweave.transfer.one_sided import OneSided
from poolweave.transfer.regions import Memory, grid_of
from poolweave.transfer.transport import Home, PullSlice, Source
from poolweave.types import UInt64Array

_PACKAGES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
_NAP_S = 20e-6  # between two looks at a read that takes longer than _EAGER_S
# Looking is what moves the bytes where the host copies them: a slice of 64 MiB takes 10 to 60 ms, one block of 400 MiB
# 400, and with naps after 50 ms it nearly stops (benchmarks/bench_transfer_nixl.py, mode c).
_EAGER_S = 1.0
_MOST_WORDS = 256  # lease words read at one time: as many as pull workers can be


class Introduction(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a receiver needs to read from us: our agent's metadata, and where tiers and lease table are registered."""

    metadata: bytes
    bases: tuple[int, ...]  # addresses in the sender's process, in the order of Hello.spaces
    words: int


_INTRODUCTIONS = msgspec.msgpack.Decoder(Introduction)


class NixlAgent:
    """The agent of one engine and the memory registered with it. Thread-safe: NIXL is asked by one thread at a time."""

    def __init__(self, home: Home) -> None:
        api = load_nixl()
        self._lock = threading.Lock()
        self._name = f"{home.instance}-{home.epoch}"
        self._agent: Any = api.nixl_agent(self._name, api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
        self._scratch = np.zeros(_MOST_WORDS, np.uint64)  # where lease words are read to
        self._free = list(range(_MOST_WORDS))
        mine = [(base, space.nbytes) for base, space in zip(home.memory.bases, home.memory.spaces, strict=True)]
        words = (home.leases.words.ctypes.data, TABLE_BYTES)
        whole = [*mine, words, (self._scratch.ctypes.data, self._scratch.nbytes)]
        self._registered = self._agent.register_memory([(base, nbytes, 0, "") for base, nbytes in whole], "DRAM")
        metadata = self._agent.get_agent_metadata()
        self.introduction = Introduction(metadata, tuple(base for base, _ in mine), words[0])

    def add(self, metadata: bytes) -> str:
        """The name under which the peer of this metadata is read. Raises ProtocolError for metadata that is none."""
        with self._lock:
            try:
                name = self._agent.add_remote_agent(metadata)
                self._agent.make_connection(name)  # here: the first read would spend its lease on it
            except Exception as error:  # NIXL's own kinds
                raise ProtocolError(f"NIXL refuses the peer's metadata: {error}", nbytes=len(metadata)) from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, peer: str) -> None:
        with self._lock:
            if self._agent is not None:
                self._agent.remove_remote_agent(peer)

    def read(self, peer: str, pieces: UInt64Array, abort: Abort | None, deadline: float) -> bool:
        """Read `pieces`, [n, 3] of (address here, address there, bytes). False when `abort` ended it.

        Returns only when nothing is written here any more. Raises TransferFailed.
        """
        device = np.zeros(len(pieces), np.uint64)
        here = np.stack((pieces[:, 0], pieces[:, 2], device), 1)
        there = np.stack((pieces[:, 1], pieces[:, 2], device), 1)
        handle = None
        try:
            with self._lock:
                agent = self._agent
                descs = agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM")
                handle = agent.initialize_xfer("READ", *descs, peer, b"")
                state = agent.transfer(handle)
            return self._wait(handle, state, abort, deadline)
        except PoolweaveError:
            raise
        except Exception as error:  # NIXL's own kinds
            raise TransferFailed(f"NIXL: {error}", peer=peer, reason="nixl") from error
        finally:
            if handle is not None:
                with self._lock:
                    self._agent.release_xfer_handle(handle)

    def read_word(self, peer: str, address: int, deadline: float) -> int:
        with self._lock:
            place = self._free.pop()
        try:
            target = self._scratch.ctypes.data + 8 * place
            self.read(peer, np.array([[target, address, 8]], np.uint64), None, deadline)
            return int(self._scratch[place])
        finally:
            with self._lock:
                self._free.append(place)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is not None:
                agent.deregister_memory(self._registered)

    def _wait(self, handle: Any, state: str, abort: Abort | None, deadline: float) -> bool:
        """Until nothing is under way: an abort waits for what NIXL has begun, a deadline cancels it with its handle."""
        eager = time.monotonic() + _EAGER_S
        while state == "PROC":
            now = time.monotonic()
            if now > deadline:
                raise TransferFailed("the deadline passed", reason="timeout")
            if now > eager:
                time.sleep(_NAP_S)
            with self._lock:
                state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise TransferFailed(f"NIXL ended a read in state {state}", reason="nixl")
        return abort is None or not abort.is_set


class NixlSource(Source):
    """Reads one sender's memory through our agent."""

    is_instant = False

    def __init__(self, agent: NixlAgent, threads: int, memory: Memory, peer: str, words: int) -> None:
        self._agent = agent
        self._threads = threads
        self._memory = memory  # its addresses are the sender's: only NIXL may follow them
        self._peer = peer
        self._words = words
        self._closed = False

    def pull(self, slice_: PullSlice) -> Outcome:
        if self._closed:
            return Outcome.REVOKED
        offer, first, count = slice_.offer, slice_.first, slice_.target.num_blocks
        tiers = np.frombuffer(offer.tiers, np.uint8)[first : first + count]
        slots = np.frombuffer(offer.slots, np.int32)[first : first + count]
        source = self._memory.extents(tiers, slots, slice_.windows)
        deadline = time.monotonic() + slice_.timeout_s
        if not self._agent.read(self._peer, pair_runs(slice_.target, source), slice_.abort, deadline):
            return Outcome.ABORTED
        word = self._agent.read_word(self._peer, self._words + 8 * slot_of(offer.offer), deadline)
        if word != offer.offer:
            return Outcome.REVOKED
        if slice_.hashes is not None:
            hash_blocks(slice_.target, 0, self._threads, slice_.hashes)
        return Outcome.DONE

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._agent.remove(self._peer)


class NixlTransport(OneSided):
    """Raises ConfigError where `nixl` is not installed."""

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        self._agent = NixlAgent(home)

    def introduce(self, connection: socket.socket) -> tuple[str, tuple[int, ...]]:
        return base64.b64encode(msgspec.msgpack.encode(self._agent.introduction)).decode(), ()

    def attach(self, hello: Hello, fds: Sequence[int], layout: KVLayout) -> NixlSource:
        for fd in fds:
            os.close(fd)
        try:
            introduction = decode(_INTRODUCTIONS, base64.b64decode(hello.data_address, validate=True))
        except binascii.Error as error:
            raise ProtocolError(f"{hello.instance} gave no NIXL metadata: {error}") from error
        if len(introduction.bases) != len(hello.spaces):
            raise ProtocolError(f"{len(introduction.bases)} addresses came for {len(hello.spaces)} tiers")
        places = zip(hello.spaces, introduction.bases, strict=True)
        memory = Memory({space.tier: grid_of(layout, space, base) for space, base in places})
        peer = self._agent.add(introduction.metadata)
        return NixlSource(self._agent, self._home.limits.copy_threads, memory, peer, introduction.words)

    def close(self) -> None:
        self._agent.close()


def pair_runs(target: Extents, source: Extents) -> UInt64Array:
    """[n, 3] of (address in target, address in source, bytes): each piece is one run at both ends."""
    (to, to_bytes), (at, at_bytes) = _runs(target), _runs(source)
    to_ends, at_ends = np.cumsum(to_bytes), np.cumsum(at_bytes)
    ends = np.union1d(to_ends, at_ends)
    starts = np.concatenate((np.zeros(1, np.uint64), ends[:-1]))
    i, j = np.searchsorted(to_ends, starts, "right"), np.searchsorted(at_ends, starts, "right")
    here = to[i] + (starts - (to_ends[i] - to_bytes[i]))
    there = at[j] + (starts - (at_ends[j] - at_bytes[j]))
    size = ends - starts
    joined = (here[1:] == here[:-1] + size[:-1]) & (there[1:] == there[:-1] + size[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    return np.stack((here[first], there[first], np.add.reduceat(size, first)), 1)


def _runs(extents: Extents) -> tuple[UInt64Array, UInt64Array]:
    flat = np.empty(2 * extents.num_runs, np.uint64)
    extents.read_runs(flat)
    return flat[::2], flat[1::2]


@functools.cache
def load_nixl() -> Any:
    """The API of the installed package. Raises ConfigError where there is none."""
    for name in _PACKAGES:
        try:
            api = importlib.import_module(name)
        except ImportError:
            continue
        # The libraries that come with UCX are torn down in an order that ends in a segmentation fault (seen with nixl
        # 1.5.1: libnl's destructors). So the process leaves without them, after all that Python and C registered.
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)
        return api
    raise ConfigError(
        "the nixl transport needs the package nixl: pip install 'poolweave[nixl]'", setting="listen", value="nixl"
    )
