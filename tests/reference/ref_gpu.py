"""A GPU and NCCL made of this process's memory, so that pools on devices can be tested where there is none.

The driver is tests/csrc/stand_in_cuda.cpp, compiled when it is first wanted and loaded under the driver's own name; the
product opens it as it would the real one. NCCL is the class below: two-sided and asynchronous as the real one is, what
it was asked for is done by a thread, and the stream tells when.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_SOURCE = Path(__file__).parents[1] / "csrc" / "stand_in_cuda.cpp"
_loaded: list[Any] = []


def _stand_in() -> Any:
    if not _loaded:
        compiler = shutil.which("c++") or shutil.which("g++")
        if compiler is None:
            pytest.skip("no C++ compiler for the stand-in of the CUDA driver")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "libcuda.so.1"
            wanted = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1"]
            subprocess.run([compiler, *wanted, str(_SOURCE), "-o", str(library)], check=True)
            _loaded.append(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))
        for name in ("stand_in_used", "stand_in_registered"):
            getattr(_loaded[0], name).restype = ctypes.c_ulonglong
        for name in ("stand_in_hold", "stand_in_go_on", "stand_in_fail"):
            getattr(_loaded[0], name).argtypes = [ctypes.c_void_p]
    return _loaded[0]


@contextmanager
def one_gpu(nbytes: int = 4 << 30) -> Iterator[Any]:
    """A machine with one GPU of so much memory; the stand-in, to ask. Nothing of it may be left at the end."""
    stand_in = _stand_in()
    stand_in.stand_in_set(1, ctypes.c_ulonglong(nbytes))
    try:
        yield stand_in
    finally:
        stand_in.stand_in_set(0, ctypes.c_ulonglong(0))


def bytes_at(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """The stand-in's memory is this process's."""
    return (ctypes.c_char * nbytes).from_address(address)


class NcclFailed(Exception):
    """As the binding's own."""


class NCCLConfig:
    def __init__(self, *, blocking: bool) -> None:
        assert not blocking, "a blocking communicator cannot be given up"


class UniqueId:
    _serial = itertools.count(1)

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def __bytes__(self) -> bytes:
        return self._raw

    @staticmethod
    def from_bytes(raw: bytes) -> UniqueId:
        if len(raw) != 128:
            raise ValueError(f"an id has 128 bytes, got {len(raw)}")
        return UniqueId(raw)


class _Meeting:
    """What two ranks share: what was sent and not received yet."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.sent: queue.Queue[tuple[int, int, threading.Event]] = queue.Queue()
        self.aborted = threading.Event()
        self.moving = threading.Lock()  # held while bytes move: an abort waits for them


class Communicator:
    """Two ranks, one operation at a time."""

    _meetings: dict[bytes, _Meeting] = {}  # noqa: RUF012
    _lock = threading.Lock()
    held: dict[int, threading.Event] = {}  # noqa: RUF012  by rank: operations wait for it
    fails: set[int] = set()  # noqa: RUF012  ranks whose next operation fails
    live = 0

    def __init__(self, rank: int, unique_id: UniqueId) -> None:
        self._rank = rank
        with self._lock:
            self._meeting = self._meetings.setdefault(bytes(unique_id), _Meeting())
            self._meeting.ranks.add(rank)
            Communicator.live += 1
        self._state = 0
        self._valid = True
        self._running: list[threading.Thread] = []

    @classmethod
    def init(cls, nranks: int, rank: int, unique_id: UniqueId, config: NCCLConfig) -> Communicator:
        assert nranks == 2
        assert isinstance(config, NCCLConfig)
        return cls(rank, unique_id)

    def get_async_error(self) -> int:
        assert self._valid, "asked after it was given up"
        return self._state if len(self._meeting.ranks) == 2 else 7

    def send(self, buffer: Any, peer: int, *, stream: int) -> None:
        self._enqueue(buffer, peer, stream, self._send)

    def recv(self, buffer: Any, peer: int, *, stream: int) -> None:
        self._enqueue(buffer, peer, stream, self._receive)

    def abort(self) -> None:
        if self._valid:
            self._valid = False
            with self._meeting.moving:
                self._meeting.aborted.set()
            for thread in self._running:  # as the real one: nothing is written here any more
                thread.join()
            with self._lock:
                Communicator.live -= 1

    def _enqueue(self, buffer: Any, peer: int, stream: int, work: Any) -> None:
        assert self._valid
        assert peer == 1 - self._rank
        assert self.get_async_error() == 0, "NCCL was asked before it was ready"
        if self._rank in self.fails:
            self.fails.discard(self._rank)
            self._state = 6
            return
        facts = buffer.__cuda_array_interface__
        (nbytes,), (address, readonly) = facts["shape"], facts["data"]
        assert facts["typestr"] == "|u1"
        assert not readonly
        _stand_in().stand_in_hold(stream)
        thread = threading.Thread(target=self._run, args=(work, address, nbytes, stream), daemon=True)
        self._running = [one for one in self._running if one.is_alive()] + [thread]
        thread.start()

    def _run(self, work: Any, address: int, nbytes: int, stream: int) -> None:
        gate = self.held.get(self._rank)
        while gate is not None and not gate.wait(0.01):
            if self._meeting.aborted.is_set():
                return  # the stream stays busy: who gave up does not look at it any more
        if work(address, nbytes):
            _stand_in().stand_in_go_on(stream)

    def _send(self, address: int, nbytes: int) -> bool:
        taken = threading.Event()
        self._meeting.sent.put((address, nbytes, taken))
        while not taken.wait(0.01):
            if self._meeting.aborted.is_set():
                return False
        return True

    def _receive(self, address: int, nbytes: int) -> bool:
        while True:
            try:
                source, size, taken = self._meeting.sent.get(timeout=0.01)
                break
            except queue.Empty:
                if self._meeting.aborted.is_set():
                    return False
        assert size == nbytes
        with self._meeting.moving:
            if self._meeting.aborted.is_set():  # the sender's buffer is gone
                return False
            ctypes.memmove(address, source, nbytes)
        taken.set()
        return True


class Nccl:
    """The module `nccl.core` as far as it is used."""

    Communicator = Communicator
    NCCLConfig = NCCLConfig
    UniqueId = UniqueId

    @staticmethod
    def get_unique_id() -> UniqueId:
        return UniqueId(next(UniqueId._serial).to_bytes(128, "little"))
