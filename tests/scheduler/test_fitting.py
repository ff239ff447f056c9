from __future__ import annotations

import numpy as np
import pytest

from poolweave.errors import ConfigError
from poolweave.scheduler.fitting import ErrorReport, cross_report, fit_relative, folds


def test_exact_line_is_found() -> None:
    x = np.arange(1.0, 9.0)
    rows = np.stack([np.ones(8), x, x * x * 1e6], axis=1)
    assert fit_relative(rows, 3 + 2 * x + 5e-7 * 1e6 * x * x, "line") == pytest.approx([3, 2, 5e-7])


def test_short_calls_count_as_much_as_long_ones() -> None:
    x = np.array([1.0, 1000.0])
    (slope,) = fit_relative(x[:, None], np.array([2.0, 1000.0]), "slope")  # 2 a unit, or 1 a unit
    assert slope == pytest.approx(1.2)  # least squares of absolute errors would say 1.000001


@pytest.mark.parametrize(
    ("rows", "seconds", "message"),
    [
        (np.ones((1, 2)), [1.0], "1 measured points cannot fit 2 terms"),
        (np.ones((0, 2)), [], "0 measured points"),
        (np.ones((3, 2)), [1.0, 1.0, 1.0], "lie on 1 of 2 terms"),
        (np.ones((3, 1)), [1.0, 0.0, 1.0], "must be positive"),
        (np.array([[1.0, 0.0], [1.0, 0.0]]), [1.0, 1.0], "a term is zero"),
    ],
)
def test_points_that_cannot_be_fitted(rows: np.ndarray, seconds: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_relative(rows, np.array(seconds), "model")


def test_error_report() -> None:
    report = ErrorReport.of([1.1, 1.8, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0])
    assert report.num_points == 4
    assert (report.mean, report.p50, report.max) == pytest.approx((0.05, 0.05, 0.1))
    assert report.bias == pytest.approx(0.0)
    with pytest.raises(ConfigError, match="no held-out point"):
        ErrorReport.of([], [])


def test_folds_hold_each_sample_out_once_and_are_repeatable() -> None:
    samples = list(range(20))
    cut = folds(samples, 0.25, seed=3)
    assert [(len(seen), len(unseen)) for seen, unseen in cut] == [(15, 5)] * 4
    assert all(sorted(seen + unseen) == samples for seen, unseen in cut)
    assert sorted(sample for _, unseen in cut for sample in unseen) == samples
    assert folds(samples, 0.25, seed=3) == cut != folds(samples, 0.25, seed=4)
    assert [len(unseen) for _, unseen in folds(samples[:3], 0.0)] == [1, 1, 1]
    assert [len(unseen) for _, unseen in folds(samples[:3], 1.0)] == [2, 1]
    with pytest.raises(ConfigError, match="1 samples"):
        folds([1])


def test_cross_report_judges_only_unseen_points() -> None:
    fitted: list[list[int]] = []

    def fit(seen: list[int]) -> object:
        fitted.append(list(seen))
        return lambda sample: 0.0 if sample in seen else float(sample)

    report = cross_report(list(range(1, 11)), fit, float)  # type: ignore[arg-type]
    assert (report.num_points, report.max) == (10, 0.0)
    assert [len(seen) for seen in fitted] == [7, 7, 8, 8]
