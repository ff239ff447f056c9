"""`poolweave instance`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated, Any

import typer


def instance(
    config: Annotated[Path, typer.Argument(help="TOML file of the instance.", metavar="INSTANCE.TOML")],
    registry: Annotated[str | None, typer.Option(help="Join there: tcp://HOST:PORT or etcd://HOST:PORT/NAME.")] = None,
    name: Annotated[str | None, typer.Option(help="Its name, in place of the file's.")] = None,
    listen: Annotated[str | None, typer.Option(help="Where it takes control messages.")] = None,
) -> None:
    """Run one instance until SIGTERM; its address is printed."""
    from poolweave.config import from_mapping as build
    from poolweave.config import load, to_mapping
    from poolweave.serving.instance.config import InstanceConfig
    from poolweave.serving.instance.process import Instance
    from poolweave.serving.process.service import run_service

    settings = load(config, InstanceConfig)
    given: dict[str, Any] = {"registry": registry, "name": name, "listen": listen}
    changes = {key: value for key, value in given.items() if value is not None}
    settings = build({**to_mapping(settings), **changes}, InstanceConfig, where="options")
    code = run_service(Instance, settings)
    gc.collect()  # views and ranges first, the native module after them
    raise typer.Exit(code)
