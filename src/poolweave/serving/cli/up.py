"""`poolweave up`."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from poolweave.serving.cli.json_option import JsonLines, say


def up(
    config: Annotated[Path, typer.Argument(help="TOML file of the deployment.", metavar="DEPLOYMENT.TOML")],
    json_lines: JsonLines = False,
) -> None:
    """Start a whole deployment: registry, instances and HTTP door. Ctrl-C or SIGTERM drains and ends it.

    What the processes print (warnings, tracebacks) comes on stderr after their names."""
    from rich.console import Console

    from poolweave.serving.deployment import Deployment, Onlooker, StartStopped, load_deployment
    from poolweave.serving.process.signals import ended_by

    settings = load_deployment(config)
    ending = threading.Event()
    console = Console(stderr=True)
    started = 0
    parts = len(settings.instances) + settings.serves + (settings.registry is None)

    def progress(name: str, address: str) -> None:
        nonlocal started
        started += 1
        if json_lines:
            say({"event": "up", "name": name, "address": address})
        else:
            console.print(f"[{started}/{parts}] {name} at {address}", markup=False, highlight=False)

    def printed(name: str, line: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads stderr any more: the part runs on
            console.print(f"{name}: {line}", markup=False, highlight=False, soft_wrap=True)

    try:
        with (
            ended_by(signal.SIGTERM, signal.SIGINT, stop=ending.set),
            Deployment(settings, Onlooker(up=progress, printed=printed, ending=ending)) as deployment,
        ):
            url, where = (deployment.url, "ready") if settings.serves else (None, "joined")
            if json_lines:
                say({"event": where, "url": url, "registry": deployment.registry, "pids": deployment.pids})
            else:
                done = f"serving at {url}/v1" if settings.serves else f"joined {deployment.registry}"
                console.print(f"{done} (Ctrl-C ends it)", markup=False, highlight=False)
            ending.wait()
            if not json_lines:
                console.print("draining")
    except StartStopped:
        console.print("ended before everything was up")
