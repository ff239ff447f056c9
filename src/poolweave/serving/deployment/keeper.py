"""Keeps one service running: starts it, waits for its end, starts it again at the same address.

One that a signal stopped for as long as a lease lasts is dead to everybody else: it is killed, so that its next life
can begin.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from poolweave.errors import PoolweaveError
from poolweave.serving.deployment.spares import Spares
from poolweave.serving.process.child import Child, Program

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
_MOST_S = 30.0  # between two starts of what fails again and again


@dataclass(frozen=True, slots=True)
class Upkeep:
    """How a service is kept: bounds of its start, between two starts (from a failure to the next one) and of standing
    still; how its settings name an address; and who hears what it prints (its name, a line; in the keeper's thread).
    `spares`: who are asked before a process is started."""

    start_timeout_s: float
    restart_s: float
    stopped_s: float
    at: Callable[[Program, str], Program] = lambda program, address: program
    hear: Callable[[str, str], None] = lambda name, line: None
    spares: Spares | None = None


class StartStopped(Exception):
    """Somebody asked for the end while things were starting."""


class Keeper:
    """Starts the service at construction, in a thread of its own; `close` ends it."""

    def __init__(self, program: Program, upkeep: Upkeep) -> None:
        self.name = program.name
        self.restarts = 0
        self._program = program
        self._upkeep = upkeep
        self._child: Child | None = None
        self._address: str | None = None
        self._error: Exception | None = None
        self._started = threading.Event()  # it was ready once, or could not
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"keeper-{self.name}", daemon=True)
        self._thread.start()

    def wait_ready(self, ending: threading.Event | None = None) -> str:
        """-> its address, the same after restarts. Raises what kept it from starting the first time, and StartStopped
        when `ending` is set before that is known."""
        known = False
        while not known:
            if ending is not None and ending.is_set():
                raise StartStopped
            known = self._started.wait(_LOOK_S)
        if self._error is not None:
            raise self._error
        assert self._address is not None
        return self._address

    @property
    def pid(self) -> int | None:
        """Of its process; None between two lives."""
        child = self._child
        return child.pid if child is not None and child.alive else None

    def begin_stop(self) -> None:
        """Ask it to end, and do not start it again."""
        self._ending.set()
        child = self._child
        if child is not None:
            child.begin_stop()

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait for its end, by force after `timeout_s`. Idempotent."""
        self.begin_stop()
        self._thread.join(timeout_s)
        child = self._child
        if self._thread.is_alive() and child is not None:
            child.kill()
        self._thread.join()

    def _run(self) -> None:
        pause_s = self._upkeep.restart_s
        while not self._ending.is_set():
            since_s = time.monotonic()
            try:
                self._live()
                pause_s = self._upkeep.restart_s
            except Exception as error:
                if not isinstance(error, (PoolweaveError, OSError)):  # those: no memory or descriptor for a process
                    logger.exception("%s broke its keeper", self.name)
                if not self._started.is_set():
                    self._error = error
                    self._started.set()
                    return
                logger.error("%s cannot be started again: %s", self.name, error)
                pause_s, since_s = min(_MOST_S, pause_s * 2), time.monotonic()
            self.restarts += 1
            self._ending.wait(since_s + pause_s - time.monotonic())
        self._started.set()

    def _live(self) -> None:
        """One life, from its start to its end."""
        spares = self._upkeep.spares
        with contextlib.nullcontext() if spares is None else spares.starting():
            child = self._start(spares)
        try:
            while child.alive and not self._ending.wait(_LOOK_S):
                self._look_after(child)
            if not self._ending.is_set():
                logger.warning(
                    "%s (pid %d) ended with %s: %s", self.name, child.pid, child.exit_code, child.last_words()
                )
            while child.alive:
                child.begin_stop()
                threading.Event().wait(_LOOK_S)
            self._hear(child)
        finally:
            child.close()

    def _start(self, spares: Spares | None) -> Child:
        """-> a process that is ready."""
        program = self._program if self._address is None else self._upkeep.at(self._program, self._address)
        waiting = spares.take(program) if spares is not None and self._started.is_set() else None
        child = self._child = waiting or Child(program)
        try:
            if self._ending.is_set():  # since before begin_stop could see the child
                child.begin_stop()
            address = child.wait_ready(self._upkeep.start_timeout_s, lambda: self._look_after(child))
        except BaseException:
            child.close()
            raise
        self._address = self._address or address
        logger.info("%s is up: pid %d", self.name, child.pid)
        self._started.set()
        return child

    def _look_after(self, child: Child) -> None:
        self._hear(child)
        if self._upkeep.spares is not None:
            self._upkeep.spares.look_after()
        if child.stopped_s >= self._upkeep.stopped_s:
            logger.warning("%s was stopped for %.3g s; it is started again", self.name, child.stopped_s)
            child.kill()

    def _hear(self, child: Child) -> None:
        while lines := child.new_lines():
            for line in lines:
                with contextlib.suppress(OSError):  # nobody reads our own output any more: no fault of the service
                    self._upkeep.hear(self.name, line)


def at_listen(prefix: str = "") -> Callable[[Program, str], Program]:
    """For settings with a `listen`: the address without `prefix`."""

    def at(program: Program, address: str) -> Program:
        return replace(program, config=replace(program.config, listen=address.removeprefix(prefix)))

    return at
