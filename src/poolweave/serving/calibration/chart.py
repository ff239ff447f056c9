"""MemServe's Figure 14 on this machine: predicted against measured, and the error before and after a change of TP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from poolweave.serving.axes import INK, dress
from poolweave.serving.calibration.fit import Fitted

_LEVELS = {"operators": ("by operator", "#1b6e4f"), "architecture": ("whole model", "#f2a65a")}
_MARKS = "o^sDv"


def draw_calibration(fitted: Fitted, path: Path) -> None:
    """Write the picture as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), dpi=140, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    found = fitted.calibration
    figure.suptitle(f"Cost models of {found.model} ({found.dtype}) on {found.device}", fontsize=11, color=INK)
    left, right = figure.subplots(1, 2)
    _predictions(left, fitted)
    _errors(right, fitted)
    figure.savefig(path)


def _predictions(axis: Any, fitted: Fitted) -> None:
    dress(axis, "Prompts that no fit has seen", "predicted ms", "measured ms")
    for level, (label, colour) in _LEVELS.items():
        for number, tp in enumerate(dict.fromkeys(point.tp for point in fitted.points)):
            points = [point for point in fitted.points if point.tp == tp]
            axis.plot(
                [point.measured_s * 1e3 for point in points], [getattr(point, f"{level}_s") * 1e3 for point in points],
                _MARKS[number % len(_MARKS)], markersize=5, color=colour, alpha=0.8, label=f"{label}, TP {tp}",
            )  # fmt: skip
    ends = [extreme(point.measured_s for point in fitted.points) * 1e3 for extreme in (min, max)]
    axis.plot(ends, ends, color=INK, linewidth=0.8)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.legend(fontsize=8, frameon=False)


def _errors(axis: Any, fitted: Fitted) -> None:
    dress(axis, "Mean error", "%")
    errors = fitted.calibration.errors
    ranks = list(dict.fromkeys(point.tp for point in fitted.points))
    for number, (level, (label, colour)) in enumerate(_LEVELS.items()):
        means = [100 * errors[f"{level}_tp{tp}"].mean for tp in ranks]
        bars = axis.bar([place + 0.4 * number for place in range(len(ranks))], means, 0.36, color=colour, label=label)
        axis.bar_label(bars, [f"{mean:.1f}" for mean in means], fontsize=8, color=INK)
    names = ["as measured", *(f"after a change to TP {tp}" for tp in ranks[1:])]
    axis.set_xticks([place + 0.2 for place in range(len(ranks))], names, fontsize=9)
    axis.legend(fontsize=8, frameon=False)
