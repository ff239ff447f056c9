"""The door as an operating-system process: `python -m poolweave.serving.door.server`.

SIGTERM drains: what is inside is answered, what comes is sent elsewhere with 503, and then it ends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

from poolweave.errors import AddressInUse, ConfigError
from poolweave.scheduler.configuration import Difference
from poolweave.serving.door.app import create_app
from poolweave.serving.door.config import DoorConfig
from poolweave.serving.door.houses import Houses
from poolweave.serving.membership import open_registry
from poolweave.serving.membership.follower import Follower
from poolweave.serving.process.service import end_process, run_process

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_CUT_OFF_S = 1  # from the end of draining to that of the connections


class DoorServer:
    """Binds at construction: a taken port is known at once. Raises AddressInUse, ConfigError, ModelNotFound."""

    def __init__(self, config: DoorConfig) -> None:
        if not config.registry:
            raise ConfigError("the door needs a registry to find its instances: set registry", setting="registry")
        self._config = config
        self._registry = open_registry(config.registry, config.membership)
        self._socket = _bind(config)
        self._loop = _new_loop()
        try:
            self._houses = self._loop.run_until_complete(self._build())
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Where clients connect."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def serve(self) -> int:
        """Until `stop` and the end of what is inside; -> the process's exit code."""
        return self._loop.run_until_complete(self._serve())

    def stop(self) -> None:
        """Begin to drain; from any thread."""
        self._loop.call_soon_threadsafe(self._stopping.set)

    def close(self) -> None:
        """Idempotent."""
        self._loop.close()
        self._socket.close()
        self._registry.close()

    async def _build(self) -> Houses:
        self._stopping = asyncio.Event()
        return Houses(self._config)

    async def _serve(self) -> int:
        app = create_app(self._houses, self._lifespan)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            proxy_headers=False,  # nobody asks where a client is
            backlog=_BACKLOG,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        serving = asyncio.create_task(server._serve([self._socket]))
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        gate = self._houses.first.gate
        gate.draining = True
        if not await gate.emptied(self._config.drain_s):
            logger.warning("%d requests are cut off after drain_s=%g", gate.inside, self._config.drain_s)
        server.should_exit = True
        stopping.cancel()
        await serving
        return 0 if self._stopping.is_set() else 1

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        houses = self._houses.all

        def changed(difference: Difference) -> None:
            for house in houses:
                loop.call_soon_threadsafe(house.links.follow, difference)

        follower = Follower(self._registry, changed)
        watching = [asyncio.create_task(house.watch_pools()) for house in houses]
        watching += [asyncio.create_task(house.listener.run()) for house in houses]
        try:
            yield
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await asyncio.to_thread(follower.close)
            for house in houses:
                house.copies.close()
                house.links.close()
                house.listener.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _bind(config: DoorConfig) -> socket.socket:
    host, port = config.endpoint
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"listen={config.listen!r}: {host} is no address here: {error}", setting="listen", value=config.listen
        ) from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)  # who comes before the loop runs waits for it
    except OSError as error:
        listener.close()
        raise AddressInUse(
            f"{config.listen} cannot be used: {error.strerror}; free that port or set listen to another one, port 0 "
            "picks a free one",
            address=config.listen,
            setting="listen",
        ) from error
    return listener


def main(arguments: list[str] | None = None) -> int:
    """The process; -> its exit code."""
    return run_process(DoorConfig, DoorServer, "poolweave.serving.door.server", arguments)


if __name__ == "__main__":
    end_process(main())
