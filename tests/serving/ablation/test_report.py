"""An ablation's figures, its files and its pictures, from made-up runs: no engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="needs the demo extra")

from rich.console import Console

from poolweave.crosspool_engine.timeline import StageRun, overlap, write_chrome_trace
from poolweave.errors import ConfigError
from poolweave.serving.ablation import CELLS, AblationConfig, AblationReport, CellReport
from poolweave.serving.ablation.chart import draw_ablation, draw_timeline
from poolweave.serving.ablation.report import report_json
from poolweave.serving.ablation.table import print_ablation


def stage(worker: str, start_us: int, end_us: int, model: str = "qwen3") -> StageRun:
    return StageRun(worker, start_us * 1000, end_us * 1000, 0, model, 1, 2)


ALONE = (stage("attention-0", 0, 100), stage("ffn-0", 100, 300), stage("attention-0", 300, 400))
TOGETHER = (stage("attention-0", 0, 100), stage("ffn-0", 50, 250, "glm"), stage("attention-0", 150, 200))


@pytest.fixture
def report() -> AblationReport:
    cells = tuple(
        CellReport.of(cell, hidden, [10.0 * n, 20.0 * n, 30.0 * n], [10.0, 20.0, 20.0], [np.array([1.0, 2.0, 9.0])])
        for hidden in (256, 512)
        for n, cell in enumerate(CELLS, 1)
    )
    return AblationReport(cells, rounds=3, layers=8, stages={"lowering": ALONE, "both": TOGETHER})


def test_ratios_are_within_a_round_and_medians_over_rounds(report: AblationReport) -> None:
    both = report.cells[3]
    assert (both.cell, both.tokens_per_s, both.ratio, both.ratio_low, both.ratio_high) == ("both", 80.0, 4.0, 4.0, 6.0)
    assert (both.tbt_ms_p50, both.tbt_ms_p99) == (2.0, pytest.approx(8.86))


def test_overlap_is_the_part_of_the_busy_time_when_two_work() -> None:
    assert overlap(ALONE) == 0.0
    assert overlap(TOGETHER) == pytest.approx(100 / 250)
    assert overlap(()) == 0.0


def test_everything_is_written(report: AblationReport, tmp_path: Path) -> None:
    draw_ablation(report, tmp_path / "a.png")
    draw_timeline(report, tmp_path / "t.png")
    write_chrome_trace(TOGETHER, tmp_path / "t.json")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "t.png"))
    found = json.loads(report_json(report))
    assert found["cells"][3]["ratio"] == 4.0
    assert found["overlap"] == {"lowering": 0.0, "both": pytest.approx(0.4)}
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["attention-0", "ffn-0"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"][1] == (
        "glm layer 1", 1, 50.0, 200.0,
    )  # fmt: skip
    console = Console(record=True, width=120)
    print_ablation(report, console)
    text = console.export_text()
    assert "pipeline" in text
    assert "both: attention and FFN workers computed at once in 40% of the busy time" in text


def test_settings_are_checked() -> None:
    for settings, message in (
        ({"rounds": 0}, "rounds"),
        ({"hidden": (100,)}, "multiples of 64"),
        ({"hidden": ()}, "multiples"),
    ):
        with pytest.raises(ConfigError, match=message):
            AblationConfig(**settings)  # type: ignore[arg-type]
