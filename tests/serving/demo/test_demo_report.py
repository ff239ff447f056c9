"""The demo's report: what it claims, what speaks against it, and that both are shown."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the demo extra")
pytest.importorskip("rich", reason="needs the serve extra")

from rich.console import Console

from poolweave.errors import PeerLost
from poolweave.serving.checked import Checked
from poolweave.serving.control.messages import Sent
from poolweave.serving.demo.chart import draw_demo
from poolweave.serving.demo.report import DemoReport, ModelRun, make_report
from poolweave.serving.demo.table import print_demo
from poolweave.serving.demo.witness import Witness
from poolweave.serving.flow_comparison.workload import TurnResult
from poolweave.serving.generation import RequestRecord, Token

BLOCK, BYTES = 16, 1000
PROMPT = tuple(range(40))
ANSWER = tuple(range(100, 110))


def record(cached: int, there: int, back: int) -> RequestRecord:
    return RequestRecord(
        request="r", flow="pd-caching-3", num_prompt=40, answer=ANSWER, finish_reason="length", cached_tokens=cached,
        to_decode=Sent(num_blocks=there, pulled_blocks=there, nbytes=there * BYTES, calls=1),
        to_prefill=Sent(num_blocks=back, pulled_blocks=back, nbytes=back * BYTES, calls=1), ttft_s=0.5, jct_s=1.0,
    )  # fmt: skip


def run(name: str, *, cached: int = 48, wrong: tuple[str, ...] = ()) -> ModelRun:
    """Two turns of one session, as PD-Caching-3 predicts them: 49 tokens are known after the first."""
    second = (*PROMPT, *ANSWER, 1, 2)
    return ModelRun(
        name=name, about="", block_tokens=BLOCK, block_bytes=BYTES,
        rounds=[[TurnResult("s", 0, PROMPT, record(0, 3, 1))], [TurnResult("s", 1, second, record(cached, 1, 0))]],
        checked=Checked(tokens=20, ties=1, wrong=wrong),
    )  # fmt: skip


@pytest.fixture
def witness() -> Witness:
    seen = Witness()
    for model in ("a", "b"):
        hear = seen.hear(model)
        for turn in range(2):
            for index in range(4):
                hear("s", turn, Token(7, index, 0.1 * index))
    for pages in ((1, 0), (3, 2), (1, 1)):
        seen.look({"kv": [{"budget_pages": 8, "mapped_pages": dict(zip("ab", pages, strict=True))}]})
    return seen


def shown(report: DemoReport) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    print_demo(report, console)
    return console.export_text()


def test_a_run_that_is_as_it_must_be_holds_and_is_shown_in_80_columns(witness: Witness, tmp_path: Path) -> None:
    report = make_report([run("a"), run("b")], witness, switches=3)
    assert report.holds, (report.wrong, report.surprises, report.failures, report.idle)
    assert (report.peak_pages, report.left_pages, report.budget_pages) == (5, 2, 8)
    assert report.models[0].peak_pages == 3
    assert len(witness.gaps_s("a")) == 4, "gaps after the second token, none across requests"
    text = shown(report)
    assert "all 40 tokens are those of transformers (2 of them second by under 1e-4)" in text
    assert "48/52" in text
    assert "prefill switched 3 times" in text
    assert "…" not in text
    draw_demo(report, witness, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_whatever_differs_breaks_the_claim_and_is_named(witness: Witness) -> None:
    fine = [run("a"), run("b")]
    lost = TurnResult("s", 1, PROMPT, None, PeerLost("gone", peer="p", part="control", reason="died"))
    kept = replace(record(48, 1, 0), return_error=PeerLost("gone", peer="p", part="control", reason="died"))
    cases = {
        "a, token 3 is 5": [run("a", wrong=("token 3 is 5",)), fine[1]],
        "cached tokens 32, predicted 48": [run("a", cached=32), fine[1]],
        "s turn 2: gone": [replace(fine[0], rounds=[fine[0].rounds[0], [lost]]), fine[1]],
        "its KV did not get back: gone": [
            replace(fine[0], rounds=[fine[0].rounds[0], [replace(fine[0].rounds[1][0], record=kept)]]), fine[1],
        ],
    }  # fmt: skip
    for says, runs in cases.items():
        report = make_report(runs, witness, switches=3)
        assert not report.holds, says
        assert says in " ".join(shown(report).split()), says
    assert not make_report(fine, witness, switches=0).holds
    witness.look({"kv": [{"budget_pages": 8, "mapped_pages": {"a": 4, "b": 1}}]})
    assert make_report(fine, witness, switches=3).idle == ("a holds 4 pages when all is over",)
