"""Cost models against a real engine: 300 requests each, as vLLM served them on an RTX PRO 6000 (lengths and times)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from poolweave.errors import ConfigError
from poolweave.serving.calibration.recorded import recorded_errors


@pytest.mark.parametrize("name", ["llama31-8b", "qwen3-30b-a3b"])
def test_a_real_engine_on_requests_that_the_fits_have_not_seen(name: str, recorded: Callable[[str], Path]) -> None:
    found = recorded_errors(recorded(f"vllm_measured_rtxpro6000_{name}.csv"))
    assert found.requests == 300
    assert found.decode.num_points == 300
    assert found.decode.mean < 0.07  # no term is below zero, whatever would fit best
    assert found.prefill.num_points >= 10
    assert found.prefill.mean < 0.08  # of all prompts, of which some stood behind others' steps
    assert found.prefill.p50 < 0.04


def follows(prompt: int, running: int) -> float:
    return 0.01 + 0.001 * prompt + 0.002 * running


def test_requests_that_follow_the_forms_are_fitted_exactly(tmp_path: Path) -> None:
    """Answers run beside some prompts; pairs that are prefilled together say nothing of how long one takes."""
    lines, lone = ["input_toks,output_toks,queued_s,first_token_s,last_token_s"], []
    for number in range(24):
        start = 100.0 * number
        for running in range(1 + number % 3):
            queued, prompt = start + running, 10 + 7 * ((number + running) % 5)
            lines.append(f"{prompt},400,{queued},{queued + follows(prompt, running)},{start + 50}")
            lone += [] if running else lines[-1:]
        lines += [f"{prompt},9,{start + 60},{start + 69},{start + 79}"] * 2
    path = tmp_path / "made.csv"
    path.write_text("\n".join(lines))
    assert recorded_errors(path).prefill.mean < 1e-6
    path.write_text("\n".join([lines[0], *lone]))
    with pytest.raises(ConfigError, match="a term is zero"):  # no answer ever runs beside a prompt
        recorded_errors(path)


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", "input_toks,output_toks,queued_s,first_token_s,last_token_s\nx,1,1,1,1\n"]
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"recorded requests|holds no requests"):
        recorded_errors(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        recorded_errors(tmp_path / "none.csv")
