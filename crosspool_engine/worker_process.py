"""A worker process as the host holds it: started, given orders, noticed when it dies, ended."""

from __future__ import annotations

import math
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from multiprocessing.connection import Connection

import msgspec

from poolweave.crosspool_engine.worker_messages import Order, WorkerSpec, receive_answer, send, values_of
from poolweave.errors import WorkerLost
from poolweave.standstill import Standstill

_START_S = 180.0  # on a busy machine; one that ends meanwhile is noticed at once
_END_S = 10.0
_STOPPED_S = 10.0  # as a lease of the membership lasts by default
_LOOK_MS = 50.0


class WorkerProcess:
    """One spawned worker. Not thread-safe: the host's one driver. Close it."""

    def __init__(self, name: str, spec: WorkerSpec) -> None:
        """Start it; it takes orders after wait_until_up()."""
        self.name = name
        ours, theirs = socket.socketpair()
        spec = msgspec.structs.replace(spec, channel_fd=theirs.fileno())
        command = [sys.executable, "-m", "poolweave.crosspool_engine.worker", msgspec.json.encode(spec).decode()]
        inherited = (theirs.fileno(), spec.board_fd, *(spec.arena_fds or ()))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=inherited, env=environment)
        self._standstill = Standstill(self._process.pid)
        self.channel = Connection(ours.detach())
        self._speaks = select.poll()
        self._speaks.register(self.channel.fileno(), select.POLLIN)
        self._outstanding: deque[int] = deque()  # slots of stages not yet answered, oldest first
        self._ended: list[int] = []

    def wait_until_up(self) -> None:
        """Wait until it takes orders. Raises WorkerLost when it does not come up; then it is gone."""
        try:
            if not self._is_heard(_START_S):
                raise WorkerLost(f"worker {self.name} was not up after {_START_S} s", worker=self.name)
            self._receive()
        except WorkerLost:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end_if_stopped(self) -> None:
        """One that a signal has kept from running for long is dead to everybody: it is made so. Call it again and
        again."""
        if self._standstill.seconds() >= _STOPPED_S:
            self.end()

    def call(self, order: Order) -> tuple[int, ...]:
        """Carry out an order. Raises what the worker raised, and WorkerLost when it died."""
        self.ask(order)
        return self.answer()

    def ask(self, order: Order) -> None:
        """Begin an order; `answer` is to be called next. Raises WorkerLost."""
        self.await_stages()  # answers come in order: those of stages first
        self._send(order)

    def answer(self) -> tuple[int, ...]:
        """What the order led to. Raises as `call`."""
        return self._receive()

    @property
    def has_ended(self) -> bool:
        """Ends of stages came in during another call: ended_stages() gives them without waiting."""
        return bool(self._ended)

    def begin_stage(self, order: Order, slot: int) -> None:
        """Send a stage without waiting for it."""
        self._send(order)
        self._outstanding.append(slot)

    def await_stages(self) -> None:
        """Until none is outstanding; ended_stages() gives them. Raises as `call`."""
        while self._outstanding:
            self._ended.append(self._await_stage())

    def ended_stages(self) -> list[int]:
        """Slots whose stages ended since the last call; does not wait."""
        while self._outstanding and self.channel.poll(0):
            self._ended.append(self._await_stage())
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Wait for a worker that was told to end (its board aborted, its channel closed); kill it if it does not."""
        self.channel.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def end(self) -> None:
        """By force; that it died is noticed as if it had by itself."""
        self._process.kill()
        self._process.wait()

    def kill(self) -> None:
        self.end()
        self.channel.close()

    def lost(self) -> WorkerLost:
        """The error that says how it died."""
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            code = None
        return WorkerLost(f"worker {self.name} died with exit code {code}", worker=self.name, exit_code=code)

    def _await_stage(self) -> int:
        slot = self._outstanding.popleft()  # answered, be it by an error
        self._receive()
        return slot

    def _send(self, order: Order) -> None:
        try:
            send(self.channel, order)
        except OSError as error:
            raise self.lost() from error

    def _is_heard(self, within_s: float) -> bool:
        """Whether it says something, or has ended, by then."""
        deadline = time.monotonic() + within_s
        while not self._speaks.poll(_LOOK_MS):
            self.end_if_stopped()
            if time.monotonic() >= deadline:
                return False
        return True

    def _receive(self) -> tuple[int, ...]:
        try:
            self._is_heard(math.inf)
            answer = receive_answer(self.channel)
        except (EOFError, OSError) as error:
            raise self.lost() from error
        return values_of(self.name, answer)
