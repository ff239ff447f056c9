"""Cost models against a real engine: 300 requests each, as vLLM served them on an RTX PRO 6000 (lengths and times)."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from poolweave.scheduler.cost_model import DecodeStep, StepSample
from poolweave.scheduler.fitting import cross_report

MODELS = ("llama31-8b", "qwen3-30b-a3b")


def decode_samples(path: Path) -> list[StepSample]:
    """One a request: its mean gap between tokens, and the batch that it decoded in, averaged over that time."""
    with path.open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    first, last, prompt, output = (
        np.array([row[name] for row in rows]) for name in ("first_token_s", "last_token_s", "input_toks", "output_toks")
    )
    samples = []
    for start, end, tokens in zip(first, last, output, strict=True):
        times = np.linspace(start, end, 60)[:, None]
        running = (first <= times) & (times < last)
        progress = np.clip((times - first) / (last - first), 0, 1)
        samples.append(
            StepSample(
                num_sequences=round(float(running.sum(axis=1).mean())),
                kv_tokens=round(float((running * (prompt + progress * output)).sum(axis=1).mean())),
                seconds=float((end - start) / (tokens - 1)),
            )
        )
    return samples


@pytest.mark.parametrize("name", MODELS)
def test_decode_step_of_a_real_engine_on_requests_it_has_not_seen(name: str, recorded: Callable[[str], Path]) -> None:
    samples = decode_samples(recorded(f"vllm_measured_rtxpro6000_{name}.csv"))

    def fit(seen: Sequence[StepSample]) -> Callable[[StepSample], float]:
        step = DecodeStep.fit(seen)
        return lambda sample: step.seconds(sample.num_sequences, sample.kv_tokens)

    report = cross_report(samples, fit, lambda sample: sample.seconds)
    assert report.num_points == 75
    assert report.mean < 0.05
