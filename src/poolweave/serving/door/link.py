"""One instance as the door's event loop sees it: a connection, and for each request a stream of replies. No threads."""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Callable
from typing import Any

import zmq

from poolweave.errors import DeadlineExceeded, PeerLost, PoolweaveError
from poolweave.serving.control.connection import HELLO_ID, RpcConnection
from poolweave.serving.control.messages import Emit, Failure, Hello, Reply, Welcome


class Replies:
    """What came for one request and was not taken yet."""

    __slots__ = ("_arrived", "_waiting")

    def __init__(self) -> None:
        self._arrived: collections.deque[Any] = collections.deque()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, reply: Any) -> None:
        self._arrived.append(reply)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self, until: float) -> list[Any]:
        """All that came, at least one; empty when nothing came before the loop's time `until`."""
        if not self._arrived:
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            timer = loop.call_at(until, self._wake)
            try:
                await self._waiting
            finally:
                timer.cancel()
                self._waiting = None
        taken = list(self._arrived)
        self._arrived.clear()
        return taken

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class InstanceLink:
    """Used from one event loop. `lost(link)` is called once when the connection ends without `close`."""

    def __init__(self, name: str, address: str, lost: Callable[[InstanceLink], None]) -> None:
        """Raises ConfigError for an address that is none."""
        self.name = name
        self._on_lost = lost
        self._ids = itertools.count(HELLO_ID)
        self._pending: dict[int, Replies] = {}
        self._loop = asyncio.get_running_loop()
        self._error: PeerLost | None = None
        self._connection = RpcConnection(address, peer=name, replies=Reply)
        self._descriptors = [int(source.getsockopt(zmq.FD)) for source in self._connection.sources]
        for descriptor in self._descriptors:
            self._loop.add_reader(descriptor, self._read)

    async def greet(self, timeout_s: float) -> Welcome:
        """The first call. Raises PeerLost, DeadlineExceeded."""
        welcome: Welcome = await self.call(Hello(), Welcome, timeout_s)
        return welcome

    async def call(self, request: Any, expect: type[Any], timeout_s: float) -> Any:
        """The one reply to `request`. Raises what the instance raised, PeerLost, DeadlineExceeded."""
        async for reply in self.stream(request, self._loop.time() + timeout_s):
            if isinstance(reply, expect):
                return reply
            break
        raise PoolweaveError(f"{self.name} answered {type(request).__name__} with something else")

    async def stream(self, request: Any, until: float) -> Any:
        """An iterator over the replies to `request`, the last one final. `until`: of the loop's time.

        Raises as `call` does. Leaving it early forgets the call; it does not stop the instance.
        """
        self.require()
        request_id, replies = next(self._ids), Replies()
        self._send(self._connection.encode(request, request_id, max(0.001, until - self._loop.time())))
        self._pending[request_id] = replies
        try:
            while True:
                taken = await replies.take(until)
                if not taken:
                    raise DeadlineExceeded(
                        f"{self.name} did not finish {type(request).__name__} in time; raise timeout_s or look at its "
                        "load",
                        peer=self.name,
                    )
                for reply in taken:
                    if isinstance(reply, Failure):
                        raise reply.error.error()
                    if isinstance(reply, PeerLost):
                        raise self._connection.error(str(reply.reason))
                    yield reply
                    if not isinstance(reply, Emit):
                        return
        finally:
            self._pending.pop(request_id, None)

    def post(self, request: Any) -> None:
        """Send `request` and forget it; an instance that has gone is no error."""
        if self._error is None:
            self._send(self._connection.encode(request, next(self._ids)))

    def require(self) -> None:
        """Raises PeerLost when the instance has gone."""
        if self._error is not None:
            raise self._connection.error(str(self._error.reason))

    def close(self) -> None:
        """Idempotent; what is pending fails with PeerLost."""
        self._end("closed here")

    def _send(self, frames: list[bytes]) -> None:
        self._connection.send(frames)
        self._loop.call_soon(self._read)  # sending may have taken the edge that announced input

    def _read(self) -> None:
        if self._error is not None:
            return
        self._take()
        reason = self._connection.lost()
        if reason is not None:
            self._take()
            self._end(reason)
            self._on_lost(self)

    def _take(self) -> None:
        for request_id, reply in self._connection.read():
            replies = self._pending.get(request_id)
            if replies is not None:
                replies.put(reply)

    def _end(self, reason: str) -> None:
        if self._error is not None:
            return
        self._error = self._connection.error(reason)
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._connection.close()
        for replies in self._pending.values():
            replies.put(self._error)
