"""`poolweave pool`."""

from __future__ import annotations

from typing import Annotated

import typer


def pool(
    name: Annotated[str, typer.Option(help="By which engines of this machine find it.")],
    size: Annotated[str, typer.Option(help="Bytes of KV, e.g. 4GiB.")] = "1GiB",
    eviction: Annotated[str, typer.Option(help="Which KV goes first: lru, lfu, fifo, s3fifo, arc.")] = "lru",
) -> None:
    """Keep the KV of engines (vLLM's connector) beyond their lives, until SIGTERM; its address is printed."""
    from poolweave.serving.pool_process.service import PoolService, PoolServiceConfig
    from poolweave.serving.process.service import run_service

    raise typer.Exit(run_service(PoolService, PoolServiceConfig(name=name, size=size, eviction=eviction)))
