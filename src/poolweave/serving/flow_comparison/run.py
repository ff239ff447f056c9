"""`poolweave flows`: sessions through every flow on real processes, ending with a table, a picture and a JSON file."""

from __future__ import annotations

import dataclasses
import importlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from poolweave.errors import ConfigError
from poolweave.serving.chat import Chat, load_chat
from poolweave.serving.cluster import LocalCluster
from poolweave.serving.engine.config import EngineConfig
from poolweave.serving.engine.sequence import SamplingParams
from poolweave.serving.flow_comparison.chart import draw
from poolweave.serving.flow_comparison.report import Report, Rounds, make_report
from poolweave.serving.flow_comparison.sessions import DEFAULT_SESSIONS, Session, load_sessions, trim
from poolweave.serving.flow_comparison.table import print_report
from poolweave.serving.flow_comparison.workload import TurnResult, Workload
from poolweave.serving.instance.config import ClusterConfig, InstanceConfig, Transport
from poolweave.serving.instance.flows import FLOWS, flow_named
from poolweave.serving.result_file import out_folder, request_row, write_result
from poolweave.types import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowsConfig:
    """What is run. `hbm` is each instance's pool; `timeout_s` is for one request. Raises ConfigError."""

    out: str = "poolweave-flows"
    sessions: str | None = None
    flows: tuple[str, ...] = tuple(FLOWS)
    model: str = "smollm2"
    turns: int = 3
    max_sessions: int = 6
    max_new_tokens: int = 20
    transport: Transport = "shm"
    hbm: str | int = "512MiB"
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name in self.flows:
            flow_named(name)
        if not self.flows or len(set(self.flows)) != len(self.flows):
            raise ConfigError(f"flows {self.flows} must be some names, each once", setting="flows", value=self.flows)
        for setting in ("turns", "max_sessions", "max_new_tokens"):
            value = getattr(self, setting)
            if value < 1:
                raise ConfigError(f"{setting} must be at least 1, got {value}", setting=setting, value=value, limit=1)

    def cluster(self) -> ClusterConfig:
        """One prefill and one decode process, and a colocated one, as the flows need; a core each."""
        disaggregated = [flow_named(name).disaggregated for name in self.flows]
        roles = [Role.PREFILL, Role.DECODE] if any(disaggregated) else []
        roles += [] if all(disaggregated) else [Role.COLOCATED]
        return ClusterConfig(
            instances=tuple(
                InstanceConfig(
                    name=f"{role.value}-{os.getpid()}",  # names are the whole machine's: two may run
                    role=role,
                    model=self.model,
                    hbm=self.hbm,
                    engine=EngineConfig(num_threads=1),
                )
                for role in roles
            ),
            transport=self.transport,
        )

    def chosen_sessions(self) -> tuple[Session, ...]:
        """The sessions asked for, cut to size."""
        every = DEFAULT_SESSIONS if self.sessions is None else load_sessions(self.sessions)
        return trim(every, max_sessions=self.max_sessions, max_turns=self.turns)


def run_flows(config: FlowsConfig, *, as_json: bool = False) -> int:
    """Run it and show it; -> the exit code: 0 when every request was answered and every figure is as predicted.

    Progress goes to stderr. Raises ConfigError, ModelNotFound and whatever else keeps the instances from starting.
    """
    progress = Console(stderr=True)
    started = time.monotonic()
    sessions = config.chosen_sessions()
    out = out_folder(config.out)
    settings = config.cluster()
    importlib.import_module("matplotlib")  # needed at the end: miss it now
    with progress.status(f"starting {len(settings.instances)} processes with {config.model} ..."):
        chat = load_chat(config.model)
        cluster = LocalCluster(settings)
    with cluster:
        ready_s = time.monotonic() - started
        runs = _run_flows(config, cluster, sessions, chat, progress)
        welcome = cluster.welcome()
    report = make_report(runs, welcome.block_tokens, welcome.block_bytes)
    seconds = {"start": ready_s, "all": time.monotonic() - started}
    draw(report, out / "flows.png", title=_title(config, sessions))
    text = write_result(out / "flows.json", config, _found(report, seconds, _requests(runs, chat)))
    console = Console()
    if as_json:
        console.out(text, end="", highlight=False)
    else:
        print_report(report, console)
        console.print(
            f"{seconds['all']:.0f} s, of which {ready_s:.0f} s to start; wrote {out}/flows.png and {out}/flows.json"
        )
    return 0 if report.complete and report.as_predicted and not report.differing else 1


def _run_flows(
    config: FlowsConfig, cluster: LocalCluster, sessions: tuple[Session, ...], chat: Chat, console: Console
) -> dict[str, Rounds]:
    """Flow after flow, with a bar each that counts requests."""
    runs: dict[str, Rounds] = {}
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        num_requests = sum(len(session.turns) for session in sessions)
        bars = {flow: progress.add_task(flow, total=num_requests, start=False) for flow in config.flows}
        for flow, bar in bars.items():

            def advance(result: TurnResult, bar: Any = bar) -> None:
                progress.advance(bar)

            cluster.generate(chat.opening("Hello!"), flow=flow, tenant=b"warm-up", timeout_s=config.timeout_s).result()
            progress.start_task(bar)
            load = Workload(
                sessions=sessions,
                talk=chat,
                sampling=SamplingParams(max_new_tokens=config.max_new_tokens),
                timeout_s=config.timeout_s,
                on_request=advance,
            )
            runs[flow] = load.run(cluster, flow)
            progress.stop_task(bar)
    return runs


def _title(config: FlowsConfig, sessions: tuple[Session, ...]) -> str:
    turns = max(len(session.turns) for session in sessions)
    return f"{config.model}: {len(sessions)} sessions of {turns} turns, KV by {config.transport}"


def _found(report: Report, seconds: Mapping[str, float], requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything the table and the picture show, and each request by itself."""
    return {
        "seconds": dict(seconds),
        "complete": report.complete,
        "as_predicted": report.as_predicted,
        "equal_tokens": not report.differing,
        **dataclasses.asdict(report),
        "requests": requests,
    }


def _requests(runs: Mapping[str, Rounds], chat: Chat) -> list[dict[str, Any]]:
    return [
        {"flow": flow, **request_row(result, chat.text)}
        for flow, rounds in runs.items() for turn in rounds for result in turn
    ]  # fmt: skip
