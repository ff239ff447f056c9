"""One service of a deployment as an operating-system process: its settings, its signals, its end.

A service is started with a lifeline by a parent, which sends the settings and is told how the start went; or by hand
with a TOML file, and then prints its address. It ends on SIGTERM, and with its parent.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeVar

from poolweave.config import load
from poolweave.errors import PoolweaveError
from poolweave.serving.control.messages import ErrorInfo
from poolweave.serving.process.lifeline import Ready, StartFailed, end_with_parent, receive_config, say
from poolweave.serving.process.signals import ended_by

C = TypeVar("C")


class Service(Protocol):
    """What a process runs."""

    @property
    def address(self) -> str: ...
    def serve(self) -> int:
        """Until `stop`; -> the process's exit code."""

    def stop(self) -> None:
        """Let `serve` return, in good order; from any thread."""

    def close(self) -> None:
        """Free everything. Idempotent."""


def run_process(
    kind: type[C],
    build: Callable[[C], Service],
    prog: str,
    arguments: list[str] | None = None,
    *,
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """Start, say so, serve. Errors of the start go to the parent, or to stderr as one line; the exit code is then 1.

    `prepare` does ahead what no setting decides, when the parent wants a process that waits for its settings.
    """
    parser = argparse.ArgumentParser(prog=prog)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", metavar="FILE", help="TOML file with the settings")
    source.add_argument("--lifeline", metavar="FD", type=int, help="socket to the parent, which sends the settings")
    parser.add_argument("--prepare", action="store_true", help="import everything before the settings come")
    options = parser.parse_args(arguments)
    if options.prepare:
        prepare()
    line = None if options.lifeline is None else socket.socket(fileno=options.lifeline)
    try:
        config = load(options.config, kind) if line is None else receive_config(line, kind)
        if line is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it stops us
            end_with_parent(line)
        return run_service(build, config, line)
    except PoolweaveError as error:
        if line is None:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        else:
            say(line, StartFailed(ErrorInfo.of(error)))
        return 1
    except EOFError:  # the parent ended before it had settings for us
        return 1


def run_service(build: Callable[[Any], Service], config: Any, line: socket.socket | None = None) -> int:
    """Build and serve until a signal; -> the exit code. Raises what building raises."""
    level = os.environ.get("POOLWEAVE_LOG_LEVEL", "WARNING").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    service = build(config)
    signals = (signal.SIGTERM, signal.SIGINT) if line is None else (signal.SIGTERM,)
    with contextlib.closing(service), ended_by(*signals, stop=service.stop):
        if line is None:
            sys.stdout.write(service.address + "\n")
            sys.stdout.flush()
        else:
            say(line, Ready(service.address))
        return service.serve()


def end_process(code: int) -> NoReturn:
    """End with `code` at once: what a service had open is closed, and taking an interpreter apart that has imported
    torch costs seconds of a core, for nothing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)
