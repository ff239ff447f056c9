"""A hostile TCP proxy that knows frames: it strikes when a message of a given kind passes, at a given byte of it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from ref_proxy import Fault, Proxy

CONTROL_HEAD = 28  # magic u16 | version u8 | flags u8 | length u32 | check u32 | sum 16 bytes
REQUEST, CHUNK_HEAD = 40, 64  # of the data plane
DATA_FRAMES = {b"PWQ1": "request", b"PWC2": "chunk"}


@dataclass(frozen=True)
class Strike:
    """What happens to the first `message` of which `skip` have passed: at its byte `at(length)`, only once.

    `kind`: cut, stall, corrupt, or kill, which calls `kill()` when the bytes before that one are through.
    """

    kind: str
    message: str
    at: Callable[[int], int]
    skip: int = 0
    kill: Callable[[], None] = lambda: None


class FrameProxy(Proxy):
    """As a Proxy, whole frames at a time. `struck` tells that it has done its harm; then all passes as it comes."""

    def __init__(self, target: tuple[str, int], strike: Strike | None) -> None:
        self._strike = strike
        self._lock = threading.Lock()
        self._left = strike.skip if strike is not None else 0
        self.struck = threading.Event()
        super().__init__(target)

    def _pass_on(self, source: socket.socket, sink: socket.socket, fault: Fault) -> None:
        buffer = bytearray()
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                buffer += data
                while (frame := _first_frame(buffer)) is not None:
                    kind, raw = frame
                    del buffer[: len(raw)]
                    if not self._send(kind, raw, (source, sink)):
                        return
            sink.sendall(buffer)
            sink.shutdown(socket.SHUT_WR)
            return
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _send(self, kind: str, raw: bytes, ends: tuple[socket.socket, socket.socket]) -> bool:
        """False when the connection is not to go on."""
        strike = self._strike
        if strike is None or kind != strike.message or not self._is_turn():
            ends[1].sendall(raw)
            return True
        at = strike.at(len(raw))
        if strike.kind == "corrupt":
            ends[1].sendall(raw[:at] + bytes([raw[at] ^ 0x55]) + raw[at + 1 :])
            self.struck.set()
            return True
        ends[1].sendall(raw[:at])
        self.struck.set()
        if strike.kind == "stall":
            self._stop_read.recv(1, socket.MSG_PEEK)  # until closed
        elif strike.kind == "kill":
            strike.kill()
        for one in ends:
            one.shutdown(socket.SHUT_RDWR)
        return False

    def _is_turn(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left == -1


def _first_frame(buffer: bytearray) -> tuple[str, bytes] | None:
    """Its kind and its bytes; None when it is not all there."""
    if len(buffer) < CONTROL_HEAD:
        return None
    kind = DATA_FRAMES.get(bytes(buffer[:4]), "")
    if kind == "request":
        end = REQUEST
    elif kind == "chunk":
        end = CHUNK_HEAD + struct.unpack_from("<Q", buffer, 16)[0]
    else:
        end = CONTROL_HEAD + struct.unpack_from("<I", buffer, 4)[0]
    if len(buffer) < end:
        return None
    return kind or msgspec.msgpack.decode(buffer[CONTROL_HEAD:end])[0], bytes(buffer[:end])
