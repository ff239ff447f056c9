"""What `poolweave` can do: one file a command, put together here. Each imports what it needs when it is called."""

from __future__ import annotations

import typer

from poolweave.serving.cli.bench import bench
from poolweave.serving.cli.calibrate import calibrate
from poolweave.serving.cli.config import config
from poolweave.serving.cli.coordinator import coordinator
from poolweave.serving.cli.demo import demo
from poolweave.serving.cli.doctor import doctor
from poolweave.serving.cli.flows import flows
from poolweave.serving.cli.instance import instance
from poolweave.serving.cli.plan import plan
from poolweave.serving.cli.pool import pool
from poolweave.serving.cli.replay import replay
from poolweave.serving.cli.simulate import simulate
from poolweave.serving.cli.top import top
from poolweave.serving.cli.up import up
from poolweave.serving.cli.version import version

app = typer.Typer(
    help="Elastic KV-cache memory pool and transfer service for LLM serving.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (up, top, replay, simulate, calibrate, instance, coordinator, pool, demo, flows, plan, doctor, version):
    app.command()(command)
app.add_typer(config, name="config")
app.add_typer(bench, name="bench")
