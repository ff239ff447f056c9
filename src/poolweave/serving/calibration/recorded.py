"""How well the forms of our cost models fit a recorded engine: a CSV of requests as vLLM served them.

Columns: input_toks, output_toks, queued_s, first_token_s, last_token_s. Each error is of requests that the fit has not
seen.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from poolweave.errors import ConfigError
from poolweave.scheduler.cost_model import DecodeStep, StepSample
from poolweave.scheduler.fitting import ErrorReport, cross_report, fit_nonnegative

_COLUMNS = ("input_toks", "output_toks", "queued_s", "first_token_s", "last_token_s")
_LOOKS = 60  # at the batch, over each request's decode


@dataclass(frozen=True, slots=True, kw_only=True)
class LonePrompt:
    """A prompt that was computed while no other was, beside `running` answers."""

    prompt_tokens: int
    running: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedErrors:
    """Of prompts computed alone (a constant, a part a token, a part a running answer), and of decode steps."""

    name: str
    requests: int
    prefill: ErrorReport
    decode: ErrorReport


@dataclass(frozen=True, slots=True)
class _Requests:
    """One array entry a request."""

    prompt: npt.NDArray[np.float64]
    output: npt.NDArray[np.float64]
    queued: npt.NDArray[np.float64]
    first: npt.NDArray[np.float64]
    last: npt.NDArray[np.float64]


def recorded_errors(path: Path, seed: int = 0) -> RecordedErrors:
    """Raises ConfigError for a file that is none of these, or has too few requests."""
    requests = _read(path)
    return RecordedErrors(
        name=path.stem,
        requests=len(requests.prompt),
        prefill=cross_report(lone_prompts(requests), _fit_prompts, lambda sample: sample.seconds, seed=seed),
        decode=cross_report(decode_samples(requests), _fit_steps, lambda sample: sample.seconds, seed=seed),
    )


def lone_prompts(requests: _Requests) -> list[LonePrompt]:
    """From the end of queueing to the first token, of those who shared that time with no other prompt."""
    samples = []
    for start, end, tokens in zip(requests.queued, requests.first, requests.prompt, strict=True):
        if int(((requests.queued < end) & (requests.first > start)).sum()) == 1:
            running = int(((requests.first <= start) & (requests.last > end)).sum())
            samples.append(LonePrompt(prompt_tokens=int(tokens), running=running, seconds=float(end - start)))
    return samples


def decode_samples(requests: _Requests) -> list[StepSample]:
    """One a request: its mean gap between tokens, and the batch that it decoded in, averaged over that time."""
    first, last = requests.first, requests.last
    samples = []
    for start, end, tokens in zip(first, last, requests.output, strict=True):
        if tokens < 2:
            continue
        times = np.linspace(start, end, _LOOKS)[:, None]
        running = (first <= times) & (times < last)
        progress = np.clip((times - first) / np.maximum(last - first, 1e-9), 0, 1)
        kv_tokens = (running * (requests.prompt + progress * requests.output)).sum(axis=1)
        samples.append(
            StepSample(
                num_sequences=round(float(running.sum(axis=1).mean())),
                kv_tokens=round(float(kv_tokens.mean())),
                seconds=float((end - start) / (tokens - 1)),
            )
        )
    return samples


def _fit_steps(seen: Sequence[StepSample]) -> Callable[[StepSample], float]:
    step = DecodeStep.fit(seen)
    return lambda sample: step.seconds(sample.num_sequences, sample.kv_tokens)


def _fit_prompts(seen: Sequence[LonePrompt]) -> Callable[[LonePrompt], float]:
    rows = np.array([[1.0, sample.prompt_tokens, sample.running] for sample in seen])
    constant, token, answer = fit_nonnegative(rows, np.array([sample.seconds for sample in seen]), "recorded prompts")
    return lambda sample: constant + token * sample.prompt_tokens + answer * sample.running


def _read(path: Path) -> _Requests:
    try:
        with path.open(encoding="utf-8") as file:
            rows = [[float(row[name]) for name in _COLUMNS] for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as recorded requests with the columns {', '.join(_COLUMNS)}: {error!r}",
            setting="recorded", value=str(path),
        ) from error  # fmt: skip
    if not rows:
        raise ConfigError(f"{path} holds no requests", setting="recorded", value=str(path))
    return _Requests(*np.array(rows).T)
