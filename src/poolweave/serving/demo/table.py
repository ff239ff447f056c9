"""The demo's report on the terminal: one row a model, and below it what was proven."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from poolweave.serving.demo.report import DemoReport, ModelReport
from poolweave.serving.flow_comparison.table import verdict


def print_demo(report: DemoReport, console: Console) -> None:
    """80 columns."""
    title = "Three cold models: one prefill process, one CrossPool decode process"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("model\nrequests", no_wrap=True)
    headings = (
        "prompt, cached\nby turn",
        "P->D\nMiB",
        "D->P\nMiB",
        "TTFT s\nmean, P99",
        "TBT ms\nmean, P99",
        "KV pool\npages",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for model in report.models:
        table.add_row(*_row(model), end_section=True)
    console.print(table)
    tokens = sum(model.checked.tokens for model in report.models)
    ties = sum(model.checked.ties for model in report.models)
    verdict(
        console, f"all {tokens} tokens are those of transformers ({ties} of them second by under 1e-4)", report.wrong
    )
    verdict(console, "cached tokens and bytes sent are what the token lists predict", report.surprises)
    verdict(console, "every request was answered, and its KV went back", report.failures)
    shared = (
        f"prefill switched {report.switches} times; all KV was decoded from one pool of {report.budget_pages} pages: "
        f"{report.peak_pages} at most, {report.left_pages} at the end"
    )
    verdict(console, shared, report.idle)


def _row(model: ModelReport) -> tuple[str, ...]:
    cached = "\n".join(f"{turn.cached_tokens}/{turn.prompt_tokens} {turn.ratio:4.0%}" for turn in model.turns)
    return (
        f"{model.name}\n{model.requests}",
        cached,
        f"{model.to_decode.nbytes / 2**20:.1f}",
        f"{model.to_prefill.nbytes / 2**20:.1f}",
        f"{model.ttft.mean_s:.2f}\n{model.ttft.p99_s:.2f}",
        f"{1e3 * model.tbt.mean_s:.0f}\n{1e3 * model.tbt.p99_s:.0f}",
        f"{model.peak_pages}",
    )
