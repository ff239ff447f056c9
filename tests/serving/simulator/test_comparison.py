"""MemServe's Fig. 15 and Fig. 8 on the recorded files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from poolweave.serving.simulator.comparison import Comparison, Place
from poolweave.serving.simulator.paper_figures import paper_figure
from poolweave.serving.simulator.trace_choice import Workload


def draw(figure: str, file: Path, **changes: object) -> Comparison:
    asked = paper_figure(figure)
    return Comparison.of(asked.question_with(), asked.choice_with(path=file, **changes), untold)


def untold(workload: Workload, requests: int) -> Callable[[int], None]:
    return lambda count: None


def test_prompt_trees_are_never_worse_at_any_share_of_loogle(recorded: Callable[[str], Path]) -> None:
    """The paper's best point is 59% below session routing."""
    found = draw("15", recorded("loogle_longdep_qa.jsonl.xz"), shares=(0.0, 0.25, 0.75, 1.0))
    assert [place.share for place in found.places if place.rate == 8] == [0.0, 0.25, 0.75, 1.0]
    tails = [contrast for contrast in found.contrasts() if contrast.metric == "P99 TTFT"]
    assert [contrast.other for contrast in tails] == ["session", "least_load"]
    assert all(contrast.never_worse for contrast in tails), tails
    assert tails[0].best < -0.59
    hits = [reports["prompt_tree"].hit_ratio for place, reports in found.places.items() if place.rate == 8]
    assert hits == sorted(hits), "the more is common, the more is found"


def test_each_step_of_caching_takes_time_off_recorded_conversations(recorded: Callable[[str], Path]) -> None:
    found = draw("8", recorded("sharegpt_multiturn.jsonl.xz"), rates=(2.0, 8.0))
    for rate in (2.0, 8.0):
        reports = found.places[Place(rate=rate)]
        steps = [reports[flow] for flow in ("pd-basic", "pd-caching-1", "pd-caching-2", "pd-caching-3")]
        times = [report.jct.mean for report in steps]
        assert times == sorted(times, reverse=True)
        assert steps[3].ttft.mean < steps[2].ttft.mean < 0.7 * steps[0].ttft.mean
        assert steps[3].hit_ratio > steps[2].hit_ratio + 0.1
        assert steps[2].moved_bytes < 0.2 * steps[1].moved_bytes
