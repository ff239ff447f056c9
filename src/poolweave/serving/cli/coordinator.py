"""`poolweave coordinator`."""

from __future__ import annotations

from typing import Annotated

import typer


def coordinator(
    listen: Annotated[str, typer.Option(help="Where members reach it.")] = "tcp://127.0.0.1:7100",
    ttl_s: Annotated[float, typer.Option(help="Unheard for so long, a member is gone.")] = 10.0,
    heartbeat_s: Annotated[float, typer.Option(help="Under a third of ttl_s.")] = 2.0,
) -> None:
    """Run the embedded registry until SIGTERM; its address is printed. It keeps nothing on disk."""
    from poolweave.scheduler.membership import MembershipConfig
    from poolweave.serving.membership.coordinator import Coordinator, CoordinatorConfig
    from poolweave.serving.process.service import run_service

    membership = MembershipConfig(ttl_s=ttl_s, heartbeat_s=heartbeat_s)
    raise typer.Exit(run_service(Coordinator, CoordinatorConfig(listen=listen, membership=membership)))
