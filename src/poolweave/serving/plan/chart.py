"""A plan as one picture: KV demand over time under its budget, and what lies on each device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from poolweave.crosspool_engine.planner.demand import DemandCurve
from poolweave.crosspool_engine.planner.plan import Plan
from poolweave.crosspool_engine.planner.planner import PlanRequest
from poolweave.serving.axes import INK, dress
from poolweave.types import byte_unit, format_bytes

_COLOURS = ("#1b6e4f", "#4a90c4", "#f2a65a", "#8e6bbf", "#c65b5b", "#9aa0a6")
_MOMENTS = 600


def draw_plan(request: PlanRequest, plan: Plan, path: Path) -> None:
    """Write the picture as PNG. Draws off screen: no window system is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=140, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _demand(left, request, plan)
    _devices(right, request, plan)
    figure.savefig(path)


def _demand(axis: Any, request: PlanRequest, plan: Plan) -> None:
    """K_M(t) of the traces as recorded, each over one period of its own, stacked."""
    curves = [DemandCurve(workload.trace) for workload in request.workloads]
    t = np.linspace(0.0, max(curve.period_s for curve in curves), _MOMENTS)
    rows = np.array(
        [
            w.shape.kv_bytes_per_token(request.dtype_bytes) * curve.at(t % curve.period_s)[0]
            for w, curve in zip(request.workloads, curves, strict=True)
        ]
    )
    budget = plan.total_pages * plan.page_bytes
    top = max(budget, float(np.sum(rows, axis=0).max()))
    unit, size = byte_unit(top)
    dress(axis, "KV demand over time, as in the traces", unit)
    names = [workload.name for workload in request.workloads]
    axis.stackplot(t, rows / size, labels=names, colors=[_colour(n) for n in range(len(names))], alpha=0.9)
    told = f"budget {format_bytes(budget)}, {plan.total_pages} pages"
    axis.axhline(budget / size, color=INK, linewidth=1.2, label=told)
    axis.axhline(
        plan.percentile_bytes / size, color=INK, linewidth=1.2, linestyle=":",
        label=f"percentile {100 * plan.percentile:g}: {format_bytes(plan.percentile_bytes)}",
    )  # fmt: skip
    axis.axhspan(plan.low_bytes / size, plan.high_bytes / size, color=INK, alpha=0.12, linewidth=0)
    axis.set_xlabel("seconds", fontsize=9, color=INK)
    axis.set_xlim(0, t[-1])
    axis.set_ylim(0, 1.35 * top / size)
    axis.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)


def _devices(axis: Any, request: PlanRequest, plan: Plan) -> None:
    unit, size = byte_unit(request.device.usable_bytes)
    dress(axis, "What lies on each device", unit)
    ranks = range(len(plan.roles))
    bottom = np.zeros(len(plan.roles))
    for number, (model, workload) in enumerate(zip(plan.models, request.workloads, strict=True)):
        resident = workload.shape.resident_params * request.dtype_bytes
        beside = np.zeros(len(plan.roles))
        for replica in model.attention_ranks:
            beside[list(replica)] += resident / len(replica) / size
        ffn = np.array([sum(p.nbytes for p in model.ffn if p.rank == rank) for rank in ranks]) / size
        axis.bar(ranks, beside, 0.62, bottom=bottom, color=_colour(number), alpha=0.55)
        axis.bar(ranks, ffn, 0.62, bottom=bottom + beside, color=_colour(number), label=model.name)
        bottom += beside + ffn
    pool = np.zeros(len(plan.roles))
    pool[list(plan.kv_ranks)] = np.array(plan.pages_per_rank) * plan.page_bytes / size
    axis.bar(ranks, pool, 0.62, bottom=bottom, color="white", edgecolor=INK, hatch="////", label="KV pages")
    usable = request.device.usable_bytes / size
    axis.axhline(usable, color=INK, linewidth=1, linestyle="--")
    axis.text(
        len(plan.roles) - 0.6,
        usable,
        f"usable {format_bytes(request.device.usable_bytes)}",
        ha="right",
        va="bottom",
        fontsize=8,
        color=INK,
    )
    axis.set_xticks(ranks, [f"{role}\n{rank}" for rank, role in enumerate(plan.roles)])
    axis.set_ylim(0, 1.45 * max(usable, float((bottom + pool).max())))
    axis.legend(fontsize=8, frameon=False, loc="upper left", ncols=2, title="pale: beside the KV", title_fontsize=8)


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]
