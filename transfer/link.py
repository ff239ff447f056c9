"""One control connection: frames in and out of a non-blocking socket, descriptors passed along, loss told once.

The link is also how a peer's death is noticed: the kernel closes its end. Knows frames, not messages.
"""

from __future__ import annotations

import array
import errno
import logging
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence

from poolweave.errors import PoolweaveError, ProtocolError, TransferFailed
from poolweave.transfer.addresses import tune
from poolweave.transfer.frames import FRAME_LIMIT, GREETING_LIMIT, FrameDecoder, FrameEncoder
from poolweave.transfer.loop import READ, WRITE, Loop

_MOST_FDS = 16
_RIGHTS_BYTES = socket.CMSG_SPACE(4 * _MOST_FDS)
_MOST_QUEUED = 4 * FRAME_LIMIT  # a peer that reads this little is as good as lost

_log = logging.getLogger(__name__)

OnFrame = Callable[["Link", bytes, list[int]], None]
OnLost = Callable[["Link", PoolweaveError], None]


class Link:
    """send() may be called from any thread; everything else happens on the loop's thread.

    `on_frame(link, payload, fds)` gets each payload, with the descriptors that came so far (its to close).
    `on_lost(link, error)` is called once, when the connection ends by itself; not after close(). It may still send.
    """

    def __init__(self, loop: Loop, sock: socket.socket, key: bytes | None, on_frame: OnFrame, on_lost: OnLost) -> None:
        tune(sock)
        self.sock = sock
        self.owner: object = None  # whatever the user of the link hangs on it
        self._loop = loop
        self._fd = sock.fileno()
        self._encoder = FrameEncoder(key)
        self._decoder = FrameDecoder(GREETING_LIMIT, key)
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._queue: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._queued = 0
        self._fds: list[int] = []
        self._takes_fds = sock.family == socket.AF_UNIX
        self._connecting = False
        self._open = True

    def start(self, *, connecting: bool = False) -> None:
        """Begin to receive. `connecting`: the socket's connect() may be under way; frames wait for it."""
        self._connecting = connecting
        self._loop.register(self._fd, READ | (WRITE if connecting else 0), self._ready)

    def rekey(self, send: bytes | None, receive: bytes | None) -> None:
        """The greeting is over: the full frame size is allowed, under the session's keys if there are any."""
        self._encoder.rekey(send)
        self._decoder.rekey(receive, FRAME_LIMIT)
        self._takes_fds = False

    def send(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Send now as far as the socket takes it, the rest when it can. Raises TransferFailed when the link is gone."""
        with self._lock:
            if not self._open:
                raise TransferFailed("the connection is closed", reason="closed")
            frame = memoryview(self._encoder.encode(payload))
            if self._queued + len(frame) > _MOST_QUEUED:
                raise TransferFailed(f"{self._queued} bytes wait for a peer that does not read", reason="congested")
            if not self._queue and not self._connecting:
                try:
                    frame = frame[self._write(frame, tuple(fds)) :]
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise TransferFailed(f"the connection is lost: {error.strerror}", reason="lost") from error
                else:
                    fds = ()
            if len(frame):
                self._queue.append((frame, tuple(fds)))
                self._queued += len(frame)
                self._loop.modify(self._fd, READ | WRITE)

    def close(self) -> None:
        """Idempotent; on the loop's thread, or when the loop has stopped."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            self._queue.clear()
        self._loop.unregister(self._fd)
        self.sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def hand_over(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        """Another owner hears of what comes from now on."""
        self._on_frame, self._on_lost = on_frame, on_lost

    def detach(self) -> socket.socket:
        """Give the socket up to another owner. Raises ProtocolError when bytes beyond the greeting were read."""
        if self._decoder.buffered:
            raise ProtocolError("bytes came before the greeting was answered")
        self._loop.unregister(self._fd)
        with self._lock:
            self._open = False
        return self.sock

    def _write(self, frame: memoryview, fds: tuple[int, ...]) -> int:
        if not fds:
            return self.sock.send(frame, socket.MSG_NOSIGNAL)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        return self.sock.sendmsg([frame], [rights], socket.MSG_NOSIGNAL)

    def _ready(self, events: int) -> None:
        try:
            if self._connecting:
                self._finish_connecting()
            if events & WRITE:
                self._flush()
            if events & ~WRITE:
                self._receive()
        except OSError as error:
            self._lose(TransferFailed(f"the connection is lost: {error.strerror or error}", reason="lost"))
        except PoolweaveError as error:
            self._lose(error)
        except Exception as error:  # noqa: BLE001  # the connection's boundary: it ends, and both sides hear of it
            _log.exception("a handler of a connection failed")
            self._lose(TransferFailed(f"internal error: {error!r}", reason="internal"))

    def _finish_connecting(self) -> None:
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        with self._lock:
            self._connecting = False

    def _flush(self) -> None:
        with self._lock:
            while self._queue:
                frame, fds = self._queue[0]
                try:
                    sent = self._write(frame, fds)
                except BlockingIOError:
                    return
                self._queued -= sent
                if sent < len(frame):
                    self._queue[0] = (frame[sent:], ())
                else:
                    self._queue.popleft()
            self._loop.modify(self._fd, READ)

    def _receive(self) -> None:
        data = self._read()
        if data is None:
            return
        if not len(data):
            raise TransferFailed("the peer closed the connection", reason="closed")
        self._decoder.feed(data)
        while self._open and (payload := self._decoder.next()) is not None:
            fds, self._fds = self._fds, []
            self._on_frame(self, payload, fds)

    def _read(self) -> memoryview | None:
        """What has come, in a buffer that the next call uses again; None when nothing has."""
        buffer = self._loop.buffer
        try:
            if not self._takes_fds:
                return buffer[: self.sock.recv_into(buffer)]
            size, rights, _, _ = self.sock.recvmsg_into([buffer], _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        for level, kind, raw in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds += struct.unpack(f"{len(raw) // 4}i", raw[: len(raw) // 4 * 4])
        if len(self._fds) > _MOST_FDS:
            raise ProtocolError(f"a greeting brought {len(self._fds)} descriptors", limit=_MOST_FDS)
        return buffer[:size]

    def _lose(self, error: PoolweaveError) -> None:
        if self._open:
            try:
                self._on_lost(self, error)
            finally:
                self.close()


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a Unix connection, as the kernel says."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])


def is_temporary(error: OSError) -> bool:
    """True when the same accept or dial may go well a little later."""
    return error.errno in (errno.EAGAIN, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
