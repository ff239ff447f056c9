"""TlsRelay: a thread that moves bytes between one TLS connection and its end in the clear until either closes.

    native code, in the clear  <-socketpair->  this thread, OpenSSL in memory  <-TCP->  the peer
OpenSSL works on memory, not on the socket, so that one system call takes many of its records of 16 KiB: on a socket it
makes three a record. It runs without the GIL.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import select
import socket
import ssl
import threading
from collections.abc import Callable

_BYTES = 256 << 10  # at a time: much larger leaves the cache
_LINGER_MS = 500
_log = logging.getLogger(__name__)

Wrap = Callable[[ssl.MemoryBIO, ssl.MemoryBIO], ssl.SSLObject]


class TlsEnd(socket.socket):
    """The end in the clear, used like the connection itself. `failure` says why TLS ended it, if it did."""

    failure: str | None = None
    outer_name: tuple[str, int] | None = None

    def getsockname(self) -> tuple[str, int] | None:
        return self.outer_name


class TlsRelay:
    """Takes `sock` over, non-blocking; `wrap(incoming, outgoing)` makes its TLS. `ended` is called on its thread."""

    def __init__(self, sock: socket.socket, wrap: Wrap, ended: Callable[[TlsRelay], None]) -> None:
        ours, theirs = socket.socketpair()
        for one in (ours, theirs):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _BYTES)
            one.setblocking(False)
        self.end = TlsEnd(fileno=theirs.detach())
        self.end.setblocking(False)
        with contextlib.suppress(OSError):
            self.end.outer_name = sock.getsockname()
        self._sock = sock
        self._wrap = wrap
        self._ended = ended
        self._ours = ours
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.thread = threading.Thread(target=self._run, name="poolweave-tls", daemon=True)

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """End it though its peer takes nothing any more."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            self._connect()
            tls = self._wrap(self._incoming, self._outgoing)
            self._greet(tls)
            self._pump(tls)
        except ssl.SSLError as error:
            self.end.failure = _explain(error)
            _log.warning("a TLS connection ended: %s", self.end.failure)
            with contextlib.suppress(OSError):
                self._let_read()
        except OSError as error:
            self.end.failure = None if isinstance(error, (BrokenPipeError, ConnectionResetError)) else str(error)
        finally:
            self._sock.close()
            self._ours.close()
            self._ended(self)

    def _connect(self) -> None:
        """Wait until a connection under way is made."""
        self._wait(select.POLLOUT)
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, "the connection was not made")

    def _greet(self, tls: ssl.SSLObject) -> None:
        while True:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._wait(select.POLLIN)
                with contextlib.suppress(BlockingIOError):
                    self._take_in(self._sock.recv(_BYTES))
            else:
                return self._flush()

    def _take_in(self, data: bytes) -> None:
        self._incoming.write(data) if data else self._incoming.write_eof()

    def _flush(self) -> None:
        """Send all that TLS has to say."""
        sealed = memoryview(self._outgoing.read())
        while sealed:
            try:
                sealed = sealed[self._sock.send(sealed) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)

    def _let_read(self) -> None:
        """Say why, and give the peer the time to: what it has sent would reset the connection if closed unread."""
        with contextlib.suppress(BlockingIOError):
            self._sock.send(self._outgoing.read())
        self._sock.shutdown(socket.SHUT_WR)
        self._ours.shutdown(socket.SHUT_RDWR)
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while poll.poll(_LINGER_MS):
            if not self._sock.recv(_BYTES):
                return

    def _wait(self, events: int) -> None:
        """For the connection; raises when the other end gave up meanwhile, which it does at its deadline."""
        poll = select.poll()
        poll.register(self._sock, events)
        poll.register(self._ours, 0)
        if any(fd == self._ours.fileno() for fd, _ in poll.poll()):
            raise BrokenPipeError

    def _pump(self, tls: ssl.SSLObject) -> None:
        up = _Sealing(tls, self._ours, self._sock, self._outgoing)
        down = _Opening(tls, self._sock, self._ours, self._incoming)
        while not (up.over or down.over):
            if up.step() + down.step():
                continue
            poll = select.poll()
            for sock, events in (
                (self._sock, select.POLLIN * down.idle | select.POLLOUT * (not up.idle)),
                (self._ours, select.POLLIN * up.idle | select.POLLOUT * (not down.idle)),
            ):
                if events:  # else it would only say that it has ended, again and again
                    poll.register(sock, events)
            poll.poll()
        with contextlib.suppress(ssl.SSLError):
            tls.unwrap()
        with contextlib.suppress(BlockingIOError):
            self._sock.send(self._outgoing.read())


class _Way(abc.ABC):
    """One of both: from `source` through TLS, whose records lie in `sealed`, to `sink`."""

    def __init__(self, tls: ssl.SSLObject, source: socket.socket, sink: socket.socket, sealed: ssl.MemoryBIO) -> None:
        self._tls, self._source, self._sink, self._sealed = tls, source, sink, sealed
        self._clear = memoryview(bytearray(_BYTES))
        self._left = memoryview(b"")
        self._ended = False

    @property
    def idle(self) -> bool:
        """Nothing waits for the sink."""
        return not self._left

    @property
    def over(self) -> bool:
        return self._ended and self.idle

    def step(self) -> int:
        """-> bytes moved; 0 when it would block"""
        moved = 0
        with contextlib.suppress(BlockingIOError):
            if self.idle:
                moved = self._fill()
            while self._left:
                sent = self._sink.send(self._left)
                self._left = self._left[sent:]
                moved += sent
        return moved

    @abc.abstractmethod
    def _fill(self) -> int:
        """Make `_left` what is to be sent. -> bytes read of the source"""


class _Sealing(_Way):
    """Out: what native code wrote, sealed, to the peer; and what TLS itself has to say."""

    def _fill(self) -> int:
        count = 0
        try:
            count = self._source.recv_into(self._clear)
            self._ended = count == 0
        except BlockingIOError:
            pass  # TLS may have something to say all the same
        done = 0
        while done < count:
            done += self._tls.write(self._clear[done:count])
        if self._sealed.pending:
            self._left = memoryview(self._sealed.read())
        return count


class _Opening(_Way):
    """In: what the peer sent, opened, to native code."""

    def __init__(self, tls: ssl.SSLObject, source: socket.socket, sink: socket.socket, sealed: ssl.MemoryBIO) -> None:
        super().__init__(tls, source, sink, sealed)
        self._taken = memoryview(bytearray(_BYTES))
        self._has_more = True  # than fitted; or bytes that came with the greeting

    def _fill(self) -> int:
        if self._has_more and self._open():
            return 0
        count = self._source.recv_into(self._taken)
        self._sealed.write(self._taken[:count]) if count else self._sealed.write_eof()
        self._open()
        return count

    def _open(self) -> int:
        """Open what is whole of what was taken, up to a buffer full of it. -> bytes"""
        count = 0
        try:
            while count < len(self._clear):
                got = self._tls.read(len(self._clear) - count, self._clear[count:])
                if not got:
                    self._ended = True
                    break
                count += int(got)
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # frames show what was cut off
            self._ended = True
        self._left, self._has_more = self._clear[:count], count == len(self._clear)
        return count


def _explain(error: ssl.SSLError) -> str:
    """What went wrong, and which setting to look at."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused ({error.verify_message}); check tls.ca here and tls.cert there"
    reason = error.reason or str(error)
    if "ALERT" in reason:
        return f"it refuses our certificate ({reason}); check tls.cert here and tls.ca there"
    return f"it does not speak TLS as we do ({reason}); set tls on all instances, or on none"
