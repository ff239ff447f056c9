"""`poolweave top`."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from poolweave.serving.cli.json_option import JsonLines, say


def top(
    url: Annotated[str, typer.Argument(help="The door's address.")] = "http://127.0.0.1:8000",
    key: Annotated[str | None, typer.Option(help="API key.", envvar="POOLWEAVE_API_KEY")] = None,
    every_s: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option(help="Look once and end.")] = False,
    as_json: JsonLines = False,
) -> None:
    """Show a deployment's instances and what they do, until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    from poolweave.serving.http_call import get_json

    look = f"{url.rstrip('/')}/deployment"
    if as_json or once:
        while True:
            found = get_json(look, key)
            if as_json:
                say(found)
            else:
                Console().print(_table(found))
            if once:
                return
            time.sleep(every_s)
    with Live(_table(get_json(look, key)), auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(_table(get_json(look, key)), refresh=True)


def _table(found: dict[str, Any]) -> Any:
    from rich.table import Table

    state = "draining" if found["draining"] else f"{found['in_flight']} in flight"
    title = f"{found['model']} (door: pid {found['pid']}): {state}, {found['routed']} routed"
    table = Table(title=f"{title}, {found['hit_ratio']:.0%} of prompt tokens cached")
    for column in ("instance", "pid", "role", "state", "events", "queued", "answers", "KV in use"):
        table.add_column(column)
    for one in found["instances"]:
        table.add_row(
            one["name"], str(one["pid"] or "-"), one["role"], one["state"], one["events"], f"{one['queued_s']:.2f} s",
            str(one["sequences"]), f"{one['kv_usage']:.0%}",
        )  # fmt: skip
    return table
