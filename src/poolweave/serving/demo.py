"""`poolweave demo`: sessions through every flow on real processes, ending with a table, a picture and a JSON file."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from poolweave import __version__
from poolweave.errors import ConfigError
from poolweave.serving.chart import draw
from poolweave.serving.chat import Chat, load_chat
from poolweave.serving.cluster import LocalCluster
from poolweave.serving.engine.config import EngineConfig
from poolweave.serving.engine.sequence import SamplingParams
from poolweave.serving.flows import FLOWS, flow_named
from poolweave.serving.instance_config import ClusterConfig, InstanceConfig, Transport
from poolweave.serving.report import Report, Rounds, make_report
from poolweave.serving.sessions import DEFAULT_SESSIONS, Session, load_sessions, trim
from poolweave.serving.table import print_report
from poolweave.serving.workload import TurnResult, Workload
from poolweave.types import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What the demo runs. `hbm` is each instance's pool; `timeout_s` is for one request. Raises ConfigError."""

    out: str = "poolweave-demo"
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
                    name=f"{role.value}-{os.getpid()}",  # names are the whole machine's: two demos may run
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


def run_demo(config: DemoConfig, console: Console | None = None) -> int:
    """Run it and show it; -> the exit code: 0 when every request was answered and every figure is as predicted.

    Raises ConfigError, ModelNotFound and whatever else keeps the instances from starting.
    """
    console = console or Console()
    started = time.monotonic()
    sessions = config.chosen_sessions()
    out = _folder(config.out)
    settings = config.cluster()
    importlib.import_module("matplotlib")  # needed at the end: miss it now
    with console.status(f"starting {len(settings.instances)} processes with {config.model} ..."):
        chat = load_chat(config.model)
        cluster = LocalCluster(settings)
    with cluster:
        ready_s = time.monotonic() - started
        runs = _run_flows(config, cluster, sessions, chat, console)
        welcome = cluster.welcome()
    report = make_report(runs, welcome.block_tokens, welcome.block_bytes)
    seconds = {"start": ready_s, "all": time.monotonic() - started}
    draw(report, out / "demo.png", title=_title(config, sessions))
    _write_json(out / "demo.json", config, report, seconds, _requests(runs, chat))
    print_report(report, console)
    console.print(
        f"{seconds['all']:.0f} s, of which {ready_s:.0f} s to start; wrote {out}/demo.png and {out}/demo.json"
    )
    return 0 if report.complete and report.as_predicted and not report.differing else 1


def _run_flows(
    config: DemoConfig, cluster: LocalCluster, sessions: tuple[Session, ...], chat: Chat, console: Console
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


def _folder(out: str) -> Path:
    """The folder for what is written, made before anything is run. Raises ConfigError."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {out}: {error.strerror}", setting="out", value=out) from error
    return Path(out)


def _title(config: DemoConfig, sessions: tuple[Session, ...]) -> str:
    turns = max(len(session.turns) for session in sessions)
    return f"{config.model}: {len(sessions)} sessions of {turns} turns, KV by {config.transport}"


def _write_json(
    path: Path, config: DemoConfig, report: Report, seconds: Mapping[str, float], requests: list[dict[str, Any]]
) -> None:
    """Everything the table and the picture show, and each request by itself."""
    found = {
        "poolweave": __version__,
        "machine": {
            "cpus": len(os.sched_getaffinity(0)),
            "arch": platform.machine(),
            "python": platform.python_version(),
        },
        "settings": dataclasses.asdict(config),
        "seconds": dict(seconds),
        "complete": report.complete,
        "as_predicted": report.as_predicted,
        "equal_tokens": not report.differing,
        **dataclasses.asdict(report),
        "requests": requests,
    }
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _requests(runs: Mapping[str, Rounds], chat: Chat) -> list[dict[str, Any]]:
    found = []
    for flow, rounds in runs.items():
        for result in (result for turn in rounds for result in turn):
            row: dict[str, Any] = {"flow": flow, "session": result.session, "turn": result.turn + 1}
            row["prompt_tokens"] = len(result.prompt)
            if result.record is None:
                row["error"] = f"{type(result.error).__name__}: {result.error}"
            else:
                row |= _figures(result, chat)
            found.append(row)
    return found


def _figures(result: TurnResult, chat: Chat) -> dict[str, Any]:
    record = result.record
    assert record is not None
    return {
        "answer": chat.text(record.answer),
        "answer_tokens": len(record.answer),
        "finish_reason": record.finish_reason,
        "cached_tokens": record.cached_tokens,
        "matched_blocks": record.matched_blocks,
        "bytes_to_decode": record.to_decode.nbytes,
        "calls_to_decode": record.to_decode.calls,
        "bytes_to_prefill": record.to_prefill.nbytes,
        "calls_to_prefill": record.to_prefill.calls,
        "return_error": None if record.return_error is None else str(record.return_error),
        "ttft_s": round(record.ttft_s, 6),
        "jct_s": round(record.jct_s, 6),
    }
