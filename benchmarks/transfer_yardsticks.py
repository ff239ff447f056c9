"""What transfers are measured against in the same run: plain copies, and raw sockets between two processes.

Both move the same pieces from random places to places of their own, resident before they begin.
"""

from __future__ import annotations

import itertools
import mmap
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_BUFFERS = (0, 4 << 20)  # asked for in the kernel; 0: as it likes
_MOST = (1 << 18, 1 << 40)  # bytes a receive asks for
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def pieces(count: int, piece_bytes: int) -> Bytes:
    """[count, piece_bytes] of plain, resident pages: numpy would ask for huge ones, which pools do not have."""
    array = np.frombuffer(mmap.mmap(-1, count * piece_bytes), np.uint8).reshape(count, piece_bytes)
    array[...] = 1
    return array


class Memcpy:
    """A plain copy of all pieces by `threads` threads, a share each."""

    def __init__(self, count: int, piece_bytes: int, threads: int) -> None:
        shares = max(count, threads)  # one large piece is cut
        self._source, self._target = (pieces(shares, count * piece_bytes // shares) for _ in range(2))
        self._shares = np.array_split(np.random.default_rng(0).permutation(shares), threads)

    def seconds(self) -> float:
        return timed(lambda: _in_threads([self._copier(i) for i in range(len(self._shares))]))

    def _copier(self, share: int) -> Callable[[], object]:
        first = sum(len(one) for one in self._shares[:share])
        rows = self._shares[share]
        target = self._target[first : first + len(rows)]
        # One native call without the interpreter's lock: each row is one memcpy.
        return lambda: np.take(self._source, rows, axis=0, out=target, mode="clip")


class RawSockets:
    """The best of four raw programs, by a first look: by the kernel's buffers, and how much a receive asks for.

    Each connection asks once for all its pieces and receives them in place.
    """

    def __init__(self, count: int, piece_bytes: int, connections: int) -> None:
        shares = max(count, connections)
        self._target = pieces(shares, count * piece_bytes // shares)
        shape = [str(shares), str(self._target.shape[1])]
        self._child = subprocess.Popen(
            [sys.executable, __file__, *shape], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._child.stdout is not None
        self._port = int(self._child.stdout.readline())
        self._shares = np.array_split(np.random.default_rng(1).permutation(shares), connections)
        socks = {buffer: [self._dial(buffer) for _ in self._shares] for buffer in _BUFFERS}
        kinds = [(socks[buffer], most) for buffer, most in itertools.product(_BUFFERS, _MOST)]
        looks = [min(self._seconds(*kind) for _ in range(2)) for kind in kinds]
        self._best = kinds[looks.index(min(looks))]

    def seconds(self) -> float:
        return self._seconds(*self._best)

    def close(self) -> None:
        self._child.communicate(timeout=30)

    def _dial(self, buffer: int) -> socket.socket:
        sock = socket.socket()
        if buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.connect(("127.0.0.1", self._port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(buffer.to_bytes(8, "little"))
        return sock

    def _seconds(self, socks: Sequence[socket.socket], most: int) -> float:
        first, work = 0, []
        for sock, rows in zip(socks, self._shares, strict=True):
            work.append(self._puller(sock, rows, first, most))
            first += len(rows)
        return timed(lambda: _in_threads(work))

    def _puller(self, sock: socket.socket, rows: Any, first: int, most: int) -> Callable[[], object]:
        target = self._target

        def pull() -> None:
            sock.sendall(len(rows).to_bytes(8, "little") + rows.tobytes())
            for i in range(first, first + len(rows)):
                left = memoryview(target[i])
                while left:
                    left = left[sock.recv_into(left[:most]) :]

        return pull


def _in_threads(work: Sequence[Callable[[], object]]) -> None:
    others = [threading.Thread(target=one) for one in work[1:]]
    for one in others:
        one.start()
    work[0]()
    for one in others:
        one.join()


def _answer(sock: socket.socket, source: Bytes) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream = sock.makefile("rb")
    if buffer := int.from_bytes(stream.read(8), "little"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    while head := stream.read(8):
        for row in np.frombuffer(stream.read(8 * int.from_bytes(head, "little")), np.int64):
            sock.sendall(memoryview(source[row]))


def _serve(shares: int, piece_bytes: int) -> None:
    source = pieces(shares, piece_bytes)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)

    def accept() -> None:
        while True:
            threading.Thread(target=_answer, args=(listener.accept()[0], source), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
