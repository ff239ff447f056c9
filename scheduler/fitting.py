"""Fits to measured points and how far they are off on points they have not seen. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from poolweave.errors import ConfigError

Floats = npt.NDArray[np.float64]
Sample = TypeVar("Sample")


def fit_relative(rows: Floats, seconds: Floats, what: str) -> list[float]:
    """Coefficients that minimise the sum of squared *relative* errors: short calls count as much as long ones.

    rows [points, terms]. Raises ConfigError when the points cannot tell the terms apart, or a time is not positive.
    """
    points, terms = rows.shape if rows.ndim == 2 else (0, 0)
    if points < max(terms, 1):
        raise ConfigError(
            f"{what}: {points} measured points cannot fit {terms} terms; measure more", setting="samples", value=points
        )
    if not np.all(seconds > 0):
        raise ConfigError(f"{what}: measured times must be positive", setting="samples", value=float(seconds.min()))
    weighted = rows / seconds[:, None]
    scale = np.abs(weighted).max(axis=0)  # tokens squared and ones in one matrix: bring the columns to one size
    if not np.all(scale > 0):
        raise ConfigError(f"{what}: a term is zero in all {points} points; vary the lengths", setting="samples")
    solution, _, rank, _ = np.linalg.lstsq(weighted / scale, np.ones(points), rcond=1e-10)
    if rank < terms:
        raise ConfigError(
            f"{what}: {points} points lie on {rank} of {terms} terms; vary prompt and cached lengths",
            setting="samples",
            value=int(rank),
            limit=terms,
        )
    return [float(value) for value in solution / scale]


def fit_nonnegative(rows: Floats, seconds: Floats, what: str) -> list[float]:
    """`fit_relative` for terms that are times or inverse rates: the one that comes out most negative is left out, as
    0, until none does. Raises as `fit_relative`."""
    kept = list(range(rows.shape[1] if rows.ndim == 2 else 0))
    while True:
        fitted = fit_relative(rows[:, kept], seconds, what)
        if min(fitted) >= 0:
            found = dict(zip(kept, fitted, strict=True))
            return [found.get(term, 0.0) for term in range(rows.shape[1])]
        scaled = [value * rows[:, term].mean() for term, value in zip(kept, fitted, strict=True)]
        del kept[scaled.index(min(scaled))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """Relative errors |predicted - measured| / measured over points that the fit has not seen. Source: Fig. 14."""

    num_points: int
    mean: float
    p50: float
    p90: float
    max: float
    bias: float  # mean of (predicted - measured) / measured

    @classmethod
    def of(cls, predicted: Sequence[float] | Floats, measured: Sequence[float] | Floats) -> ErrorReport:
        """Raises ConfigError without points."""
        signed: npt.NDArray[Any] = np.asarray(predicted, float) / np.asarray(measured, float) - 1.0
        if signed.size == 0:
            raise ConfigError("no held-out point to report an error on", setting="samples", value=0)
        errors = np.abs(signed)
        return cls(
            num_points=int(signed.size),
            mean=float(errors.mean()),
            p50=float(np.quantile(errors, 0.5)),
            p90=float(np.quantile(errors, 0.9)),
            max=float(errors.max()),
            bias=float(signed.mean()),
        )


def folds(samples: Sequence[Sample], fraction: float = 0.25, seed: int = 0) -> list[tuple[list[Sample], list[Sample]]]:
    """`samples` cut at random into parts of `fraction` each, two at least and none empty: for each part, those to fit
    and those to report on. Every sample is reported on once, by a fit that has not seen it."""
    if len(samples) < 2:
        raise ConfigError(f"{len(samples)} samples cannot be split", setting="samples", value=len(samples), limit=2)
    parts = min(max(round(1 / max(fraction, 1 / len(samples))), 2), len(samples))
    order = np.random.default_rng(seed).permutation(len(samples)).tolist()
    held = [set(order[part::parts]) for part in range(parts)]
    return [
        ([samples[i] for i in range(len(samples)) if i not in part], [samples[i] for i in sorted(part)])
        for part in held
    ]


def cross_report(
    samples: Sequence[Sample],
    fit: Callable[[Sequence[Sample]], Callable[[Sample], float]],
    measured: Callable[[Sample], float],
    fraction: float = 0.25,
    seed: int = 0,
) -> ErrorReport:
    """Fit on all but a part of `samples`, report on that part, for every part. `fit` returns the predictor."""
    predicted, seconds = [], []
    for seen, unseen in folds(samples, fraction, seed):
        predict = fit(seen)
        predicted += [predict(sample) for sample in unseen]
        seconds += [measured(sample) for sample in unseen]
    return ErrorReport.of(predicted, seconds)
