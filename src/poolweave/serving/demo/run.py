"""The demo from start to end: processes, sessions of three models at once, checks, a table, a picture, a JSON file."""

from __future__ import annotations

import dataclasses
import importlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from poolweave.serving.cluster import LocalCluster
from poolweave.serving.control.messages import Welcome
from poolweave.serving.demo.chart import draw_demo
from poolweave.serving.demo.cold_models import DemoModel, demo_models
from poolweave.serving.demo.config import DemoConfig
from poolweave.serving.demo.report import FLOW, DemoReport, ModelRun, make_report
from poolweave.serving.demo.table import print_demo
from poolweave.serving.demo.witness import Witness
from poolweave.serving.engine.sequence import SamplingParams
from poolweave.serving.flow_comparison.report import Rounds
from poolweave.serving.flow_comparison.sessions import DEFAULT_SESSIONS, trim
from poolweave.serving.flow_comparison.workload import Workload
from poolweave.serving.generation import Generation
from poolweave.serving.result_file import out_folder, request_row, write_result
from poolweave.types import TokenIds


@dataclass(frozen=True, slots=True)
class _ModelServer:
    """One model of a cluster, as a workload asks it."""

    cluster: LocalCluster
    model: str

    def generate(
        self, tokens: TokenIds, sampling: SamplingParams | None, flow: str, *, tenant: bytes, timeout_s: float
    ) -> Generation:
        return self.cluster.generate(tokens, sampling, flow, model=self.model, tenant=tenant, timeout_s=timeout_s)


def run_demo(config: DemoConfig, *, as_json: bool = False) -> int:
    """Run it and show it; -> the exit code: 0 when all that it claims holds. Progress goes to stderr.

    Raises ConfigError, ModelNotFound and whatever else keeps the instances from starting.
    """
    progress = Console(stderr=True)
    out = out_folder(config.out)
    importlib.import_module("matplotlib")  # needed at the end: miss it now
    with progress.status("making the three models, at the first time ..."):
        models = demo_models()
    started = time.monotonic()
    with progress.status("starting a prefill and a CrossPool process with three models each ..."):
        cluster = LocalCluster(config.cluster(tuple(model.served for model in models)))
    with cluster:
        ready_s = time.monotonic() - started
        with progress.status("sessions of all three models at once ..."):
            rounds, witness = _talk(config, cluster, models)
        sizes = {member.model: member.client.welcome for member in cluster.members}
        switches = cluster.stats(cluster.members[0].name).engine["switches"]
    with progress.status("holding every token against transformers ..."):
        runs = [_checked(model, rounds[model.served.name], sizes[model.served.name]) for model in models]
    report = make_report(runs, witness, switches)
    draw_demo(report, witness, out / "demo.png")
    seconds = {"start": ready_s, "all": time.monotonic() - started}
    text = write_result(out / "demo.json", config, _found(report, seconds, _requests(models, rounds)))
    console = Console()
    if as_json:
        console.out(text, end="", highlight=False)
    else:
        print_demo(report, console)
        _show_answer(console, models, rounds)
        console.print(
            f"{seconds['all']:.0f} s, of which {ready_s:.0f} s to start; wrote {out}/demo.png and {out}/demo.json"
        )
    return 0 if report.holds else 1


def _talk(
    config: DemoConfig, cluster: LocalCluster, models: Sequence[DemoModel]
) -> tuple[Mapping[str, Rounds], Witness]:
    """The sessions of every model, side by side, after a first request of each."""
    sampling = SamplingParams(max_new_tokens=config.max_new_tokens)
    for model in models:
        prompt = model.talk.opening("Hello!")
        cluster.generate(
            prompt, SamplingParams(max_new_tokens=2), FLOW, model=model.served.name, tenant=b"warm-up",
            timeout_s=config.timeout_s,
        ).result()  # fmt: skip
    witness, ending, decode = Witness(), threading.Event(), cluster.members[-1].name
    sessions = trim(DEFAULT_SESSIONS, max_sessions=config.max_sessions, max_turns=config.turns)
    with ThreadPoolExecutor(len(models) + 1) as threads:
        watching = threads.submit(witness.watch, lambda: cluster.stats(decode).engine, ending)
        try:
            running = {}
            for model in models:
                name = model.served.name
                load = Workload(
                    sessions=sessions, talk=model.talk, sampling=sampling, timeout_s=config.timeout_s,
                    on_event=witness.hear(name),
                )  # fmt: skip
                running[name] = threads.submit(load.run, _ModelServer(cluster, name), FLOW)
            rounds = {name: future.result() for name, future in running.items()}
        finally:
            ending.set()
        watching.result()
    witness.look(cluster.stats(decode).engine)
    return rounds, witness


def _checked(model: DemoModel, rounds: Rounds, welcome: Welcome) -> ModelRun:
    from poolweave.serving.engine.reference import check_answers

    answered = [result for turn in rounds for result in turn if result.record is not None]
    asked = [(f"{result.session} turn {result.turn + 1}", result.asked()) for result in answered]
    return ModelRun(
        name=model.served.name, about=model.about, rounds=rounds, block_tokens=welcome.block_tokens,
        block_bytes=welcome.block_bytes,
        checked=check_answers(model.served.path, asked, num_threads=len(os.sched_getaffinity(0))),
    )  # fmt: skip


def _show_answer(console: Console, models: Sequence[DemoModel], rounds: Mapping[str, Rounds]) -> None:
    """A first answer of a model that knows words."""
    for model in (one for one in models if one.chat):
        for result in rounds[model.served.name][0][:1]:
            if result.record is not None:
                text = model.text(result.record.answer)
                console.print(f"{model.served.name}, {result.session}: {text!r}", markup=False, highlight=False)


def _found(report: DemoReport, seconds: Mapping[str, float], requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything the table and the picture show, and each request by itself."""
    return {
        "seconds": dict(seconds),
        "holds": report.holds,
        **dataclasses.asdict(report),
        "requests": requests,
    }


def _requests(models: Sequence[DemoModel], rounds: Mapping[str, Rounds]) -> list[dict[str, Any]]:
    return [
        {"model": model.served.name, **request_row(result, model.text)}
        for model in models for turn in rounds[model.served.name] for result in turn
    ]  # fmt: skip
