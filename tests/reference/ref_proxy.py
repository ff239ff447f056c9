"""A hostile TCP proxy: passes bytes on, byte by byte if told so, and stalls, cuts or corrupts after so many of them."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """What happens to the bytes of one direction of each connection. `after` counts from its start."""

    kind: str = "none"  # none | stall | cut | corrupt
    after: int = 0
    step: int = 65536  # most bytes passed on at once
    connections: int = 1 << 30  # how many connections are faulty; later ones are clean


CLEAN = Fault()


class Proxy:
    """Listens on a free port and forwards to `target`. `down` is the fault towards the client, `up` to the target."""

    def __init__(self, target: tuple[str, int], *, down: Fault = CLEAN, up: Fault = CLEAN) -> None:
        self._target = target
        self._down, self._up = down, up
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._stop_read, self._stop_write = socket.socketpair()
        self.num_connections = 0
        self.stalled = threading.Event()
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def close(self) -> None:
        self._stop_write.close()
        self._acceptor.join()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in [*self._sockets, self._listener, self._stop_read]:
            one.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            ready, _, _ = select.select([self._listener, self._stop_read], [], [])
            if self._stop_read in ready:
                return
            client, _ = self._listener.accept()
            try:
                target = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            self.num_connections += 1
            self._sockets += [client, target]
            for one in (client, target):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink, fault in ((target, client, self._down), (client, target, self._up)):
                clean = self.num_connections > fault.connections
                thread = threading.Thread(target=self._pass_on, args=(source, sink, Fault() if clean else fault))
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, fault: Fault) -> None:
        passed = 0
        try:
            while data := source.recv(1 << 16):
                for start in range(0, len(data), fault.step):
                    piece = data[start : start + fault.step]
                    if fault.kind != "none" and passed + len(piece) > fault.after:
                        piece = self._harm(piece, fault, fault.after - passed, (source, sink))
                    if piece is None:
                        return
                    sink.sendall(piece)
                    passed += len(piece)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            for one in (source, sink):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _harm(self, piece: bytes, fault: Fault, at: int, ends: tuple[socket.socket, socket.socket]) -> bytes | None:
        if fault.kind == "corrupt":
            if at < 0:
                return piece  # one byte was enough
            return piece[:at] + bytes([piece[at] ^ 0x55]) + piece[at + 1 :]
        if at > 0:
            ends[1].sendall(piece[:at])
        if fault.kind == "cut":
            for one in ends:
                one.shutdown(socket.SHUT_RDWR)
        else:
            self.stalled.set()
            self._stop_read.recv(1, socket.MSG_PEEK)  # until closed
        return None
