"""One control connection on the loop: frames in and out, descriptors passed along, loss told once.

The link is also how a peer's death is noticed: the kernel closes its end. Knows frames, not messages.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence

from poolweave.errors import InstanceClosed, PoolweaveError, ProtocolError, TransferFailed
from poolweave.transfer._native import Channel
from poolweave.transfer.addresses import tune
from poolweave.transfer.loop import READ, WRITE, Loop

_log = logging.getLogger(__name__)

OnFrame = Callable[["Link", bytes, list[int]], None]
OnLost = Callable[["Link", PoolweaveError], None]


class Link:
    """send() and assist() may be called from any thread; everything else happens on the loop's thread.

    `on_frame(link, payload, fds)` gets each payload, with the descriptors that came so far (its to close).
    `on_lost(link, error)` is called once, when the connection ends by itself; not after close(). It may still send.
    """

    def __init__(self, loop: Loop, sock: socket.socket, key: bytes | None, on_frame: OnFrame, on_lost: OnLost) -> None:
        tune(sock)
        self.sock = sock
        self.owner: object = None  # whatever the user of the link hangs on it
        self._loop = loop
        self._fd = sock.fileno()
        self._channel = Channel(self._fd, key)
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._reading = threading.RLock()  # one reader at a time: the loop's thread, or one that waits for an answer
        self._watching = threading.Lock()  # what the loop watches, and whether bytes wait, change together
        self._waiting = self._assisted = False
        self._greeted = False
        self._connecting = False
        self._open = True

    def start(self, *, connecting: bool = False) -> None:
        """Begin to receive. `connecting`: the socket's connect() may be under way; frames wait for it."""
        self._connecting = self._waiting = connecting
        if connecting:
            self._channel.hold()
        self._loop.register(self._fd, READ | (WRITE if connecting else 0), self._ready)

    def rekey(self, send: bytes | None, receive: bytes | None) -> None:
        """The greeting is over: the full frame size is allowed, under the session's keys if there are any."""
        self._channel.rekey(send, receive)
        self._greeted = True

    def send(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Send now as far as the socket takes it, the rest when it can. Raises TransferFailed when the link is gone."""
        try:
            waiting = self._channel.send(payload, fds) if fds else self._channel.send(payload)
        except InstanceClosed as error:
            raise TransferFailed(str(error), reason="closed") from error
        except OSError as error:
            raise TransferFailed(f"the connection is lost: {error}", reason="lost") from error
        if waiting:
            with self._watching:
                self._waiting = True
                self._watch()

    def assist(self, look_s: float, sleep_s: float, over: Callable[[], bool]) -> bool:
        """Wait for an answer and handle it here: a hop to the loop's thread less. False: it is up to the loop again.

        For a thread that waits for one: looks for `look_s`, where that pays, then sleeps up to `sleep_s`. Does nothing
        while another thread reads, or the greeting goes on, or when `over()`, asked once nobody else reads.
        """
        if self._loop.on_loop() or not self._greeted or not self._reading.acquire(blocking=False):
            return False
        came = begun = False
        try:
            waits = self._open and not over()
            came = waits and self._receive()  # what came before we did
            if waits and not came:
                begun = True
                self._assist(True)  # so that the loop sleeps on
                came = self._channel.watch(look_s, sleep_s)
                if came:
                    self._receive()
        except Exception as error:  # noqa: BLE001  # the loop's thread tells the loss
            self._loop.call_soon(lambda error=error: self._end(error))  # type: ignore[misc]
            came = False
        finally:
            if begun:
                self._assist(False)
            self._reading.release()
        return came

    def close(self) -> None:
        """Idempotent; on the loop's thread, or when the loop has stopped."""
        if not self._reading.acquire(blocking=False):
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)  # who sleeps there wakes up
            self._reading.acquire()
        try:
            if not self._open:
                return
            self._open = False
            self._channel.close()
            self._loop.unregister(self._fd)
            self.sock.close()
            for fd in self._channel.take_descriptors():
                os.close(fd)
        finally:
            self._reading.release()

    def hand_over(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        """Another owner hears of what comes from now on."""
        self._on_frame, self._on_lost = on_frame, on_lost

    def detach(self) -> socket.socket:
        """Give the socket up to another owner. Raises ProtocolError when bytes beyond the greeting were read."""
        if self._channel.buffered:
            raise ProtocolError("bytes came before the greeting was answered")
        self._loop.unregister(self._fd)
        self._channel.close()
        self._open = False
        return self.sock

    def _ready(self, events: int) -> None:
        try:
            if self._connecting:
                self._finish_connecting()
            if events & WRITE:
                self._flush()  # also while another thread waits to read
            if events & ~WRITE:
                with self._reading:
                    self._receive()
        except Exception as error:  # noqa: BLE001  # the connection's boundary: it ends, and both sides hear of it
            self._end(error)

    def _end(self, error: Exception) -> None:
        if isinstance(error, InstanceClosed):
            self._lose(TransferFailed(str(error), reason="closed"))
        elif isinstance(error, OSError):
            self._lose(TransferFailed(f"the connection is lost: {error}", reason="lost"))
        elif isinstance(error, PoolweaveError):
            self._lose(error)
        else:
            _log.error("a handler of a connection failed", exc_info=error)
            self._lose(TransferFailed(f"internal error: {error!r}", reason="internal"))

    def _finish_connecting(self) -> None:
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self._connecting = False

    def _flush(self) -> None:
        with self._watching:
            if not self._channel.flush():
                self._waiting = False
                self._watch()

    def _assist(self, begun: bool) -> None:
        with self._watching:
            self._assisted = begun
            if self._open:
                self._watch()

    def _watch(self) -> None:
        """Say what the loop is to look for. Under `_watching`."""
        self._loop.modify(self._fd, (0 if self._assisted else READ) | (WRITE if self._waiting else 0))

    def _receive(self) -> bool:
        """Handle what has come. False when that was no whole frame."""
        payload = self._channel.read_next()
        came = payload is not None
        while payload is not None:
            fds = [] if self._greeted else self._channel.take_descriptors()
            self._on_frame(self, payload, fds)
            payload = self._channel.next() if self._open else None
        return came

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
