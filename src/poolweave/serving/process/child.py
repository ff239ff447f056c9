"""One service as a child process of this one: spawned, awaited, stopped, killed. Knows no message and no pool."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from poolweave.errors import InstanceDied
from poolweave.serving.instance.config import InstanceConfig
from poolweave.serving.process.lifeline import hear, send_config
from poolweave.standstill import Standstill

_STOP_S = 10.0
_LOG_TAIL_BYTES = 2000
_LINES_BYTES = 1 << 16  # of output at a time


@dataclass(frozen=True, slots=True)
class Program:
    """What a child runs: a module that serves (see service.py), with its settings."""

    name: str
    module: str
    config: Any
    num_threads: int = 1  # of every library in it


def instance_program(config: InstanceConfig) -> Program:
    """An instance."""
    return Program(config.name, "poolweave.serving.instance.process", config, config.engine.num_threads)


class Child:
    """Started at construction; `wait_ready` gives its address. `close` always leaves the process reaped, and nobody
    whom it started.

    It has a session of its own: Ctrl-C at a terminal reaches this process alone, which ends it in order. What it prints
    goes to an unlinked temporary file, of which the end is shown when it dies at its start.
    """

    def __init__(self, program: Program, *, waits: bool = False) -> None:
        """`waits`: it imports all that its kind needs, and begins when `settle` says as whom."""
        self.name = program.name
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        ours, theirs = socket.socketpair()
        self._line = ours
        self._heard = 0  # bytes that new_lines gave
        command = [sys.executable, "-m", program.module, "--lifeline", str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(
                [*command, "--prepare"] if waits else command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=_environment(program.num_threads),
                start_new_session=True,
            )
        except BaseException:
            self._line.close()
            self._log.close()
            raise
        finally:
            theirs.close()
        self._standstill = Standstill(self._process.pid)
        if not waits:
            self.settle(program)

    def settle(self, program: Program) -> None:
        """Send the settings, once; of the module and thread count that it was started with."""
        self.name = program.name
        with contextlib.suppress(BrokenPipeError):  # it died already: wait_ready says how
            send_config(self._line, program.config)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal that killed it."""
        return self._process.poll()

    @property
    def stopped_s(self) -> float:
        """For how long a signal has kept it from running: ask again and again."""
        return self._standstill.seconds()

    def wait_ready(self, timeout_s: float, meanwhile: Callable[[], None] = lambda: None) -> str:
        """-> the address at which it takes control messages. `meanwhile` is called again and again.

        Raises the error that kept it from starting, DeadlineExceeded, InstanceDied with the end of its output.
        """
        try:
            return hear(self._line, instance=self.name, timeout_s=timeout_s, meanwhile=meanwhile)
        except InstanceDied as error:
            self._process.wait()
            raise InstanceDied(
                f"{error} with exit code {self._process.returncode}; its last words:\n{self.last_words()}",
                instance=self.name,
                exit_code=self._process.returncode,
            ) from None

    def last_words(self) -> str:
        """The end of what it printed."""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _LOG_TAIL_BYTES, max(0, size - _LOG_TAIL_BYTES))
        return tail.decode(errors="replace").strip() or "(nothing)"

    def new_lines(self) -> list[str]:
        """The whole lines that it printed since the last call."""
        printed = os.pread(self._log.fileno(), _LINES_BYTES, self._heard)
        end = len(printed) if len(printed) == _LINES_BYTES else printed.rfind(b"\n") + 1
        whole = printed[:end]
        self._heard += len(whole)
        return whole.decode(errors="replace").splitlines()

    def kill(self) -> None:
        """SIGKILL, and reap it."""
        self._process.kill()
        self._process.wait()

    def begin_stop(self) -> None:
        """Ask it to stop, also when it stands still; `close` waits for it."""
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop it, by force when it does not within seconds. Idempotent."""
        self.begin_stop()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        if not self._log.closed:
            with contextlib.suppress(ProcessLookupError):  # whom it left behind: who stands still never sees its end
                os.killpg(self.pid, signal.SIGKILL)
        self._line.close()
        self._log.close()


def _environment(num_threads: int) -> dict[str, str]:
    """Ours, with every library's own thread pool as large as the engine's."""
    threads = str(num_threads)
    return {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
