"""`poolweave up`."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer


def up(
    config: Annotated[Path, typer.Argument(help="TOML file of the deployment.", metavar="DEPLOYMENT.TOML")],
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")] = False,
) -> None:
    """Start a whole deployment: registry, instances and HTTP door. Ctrl-C or SIGTERM drains and ends it.

    What the processes print (warnings, tracebacks) comes on stderr after their names."""
    from rich.console import Console

    from poolweave.config import load
    from poolweave.serving.deployment import Deployment, DeploymentConfig, Onlooker, StartStopped

    settings = load(config, DeploymentConfig)
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: ending.set())
    console = Console(stderr=True)
    started = 0
    parts = len(settings.instances) + 1 + (settings.registry is None)

    def progress(name: str, address: str) -> None:
        nonlocal started
        started += 1
        if json_lines:
            _say({"event": "up", "name": name, "address": address})
        else:
            console.print(f"[{started}/{parts}] {name} at {address}", markup=False, highlight=False)

    def printed(name: str, line: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads stderr any more: the part runs on
            console.print(f"{name}: {line}", markup=False, highlight=False, soft_wrap=True)

    try:
        with Deployment(settings, Onlooker(up=progress, printed=printed, ending=ending)) as deployment:
            if json_lines:
                _say(
                    {"event": "ready", "url": deployment.url, "registry": deployment.registry, "pids": deployment.pids}
                )
            else:
                console.print(f"serving at {deployment.url}/v1 (Ctrl-C ends it)", markup=False, highlight=False)
            ending.wait()
            if not json_lines:
                console.print("draining")
    except StartStopped:
        console.print("ended before everything was up")


def _say(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
