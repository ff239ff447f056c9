"""Which weights rank holds which FFN weights: a small integer program, solved by HiGHS.

Knows sizes and layer times, not models. Source: CrossPool placement (Table 2) and its admitted limit that unlike
layer times unbalance the pipeline, hence: models of like layer time share a rank first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from poolweave.errors import ConfigError, PlanInfeasible

UNLIKE_WEIGHT = 0.1  # a fully unlike pair on a rank costs as much as a tenth of a rank's memory
MAX_NODES = 2_000  # bounds the search by work, not by time: the same plan on every machine


@dataclass(frozen=True, slots=True)
class Units:
    """`count` equal pieces of one model's FFN, each whole on one rank."""

    model: str
    kind: str
    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Columns:
    """Variables in order: pieces[units, rank], present[model, rank], pair[two models, rank], peak."""

    units: tuple[Units, ...]
    models: tuple[str, ...]
    ranks: int

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(itertools.combinations(range(len(self.models)), 2))

    @property
    def present(self) -> int:
        return len(self.units) * self.ranks

    @property
    def pair(self) -> int:
        return self.present + len(self.models) * self.ranks

    @property
    def peak(self) -> int:
        return self.pair + len(self.pairs) * self.ranks

    @property
    def width(self) -> int:
        return self.peak + 1


def place_units(
    units: Sequence[Units], layer_s: Mapping[str, float], *, ranks: int, capacity_bytes: int
) -> list[list[int]]:
    """Pieces of each of `units` on each rank, `[len(units)][ranks]`.

    Fits every rank, then trades the fullest rank's share of its memory against models of unlike layer time (by the
    logarithm of their ratio) on one rank. Raises PlanInfeasible with the bytes that miss, ConfigError without scipy.
    """
    needed, largest = sum(u.count * u.nbytes for u in units), max((u.nbytes for u in units if u.count), default=0)
    if needed > ranks * capacity_bytes or largest > capacity_bytes:
        raise _infeasible(needed, ranks, capacity_bytes, largest)
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise ConfigError("placing FFN weights needs scipy: pip install 'poolweave[plan]'", setting="scipy") from error
    columns = _Columns(tuple(units), tuple(dict.fromkeys(u.model for u in units)), ranks)
    rows, low, high = _constraints(columns, capacity_bytes)
    bounds, whole = _bounds(columns)
    found = milp(
        _costs(columns, layer_s),
        constraints=LinearConstraint(rows, low, high),
        bounds=Bounds(np.zeros(columns.width), bounds),
        integrality=whole,
        options={"node_limit": MAX_NODES, "mip_rel_gap": 1e-3},
    )
    if found.x is None:
        raise _infeasible(needed, ranks, capacity_bytes, largest)
    counts = np.round(found.x[: columns.present]).astype(int).reshape(len(units), ranks)
    return [[int(count) for count in row] for row in counts]


def _infeasible(needed: int, ranks: int, capacity: int, largest: int) -> PlanInfeasible:
    return PlanInfeasible(
        f"FFN weights need {needed:,} bytes in pieces of up to {largest:,}, {ranks} weights ranks hold "
        f"{ranks * capacity:,}: add devices or memory, split by expert, or serve fewer models",
        part="weights", needed_bytes=needed, available_bytes=ranks * capacity,
    )  # fmt: skip


def _costs(columns: _Columns, layer_s: Mapping[str, float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The fullest rank, and how unlike the models are that share one; a hair for each model on a rank at all."""
    costs = np.zeros(columns.width)
    costs[columns.peak] = 1.0
    costs[columns.present : columns.pair] = 1e-4
    for n, (a, b) in enumerate(columns.pairs):
        unlike = min(abs(math.log(layer_s[columns.models[a]] / layer_s[columns.models[b]])), 1.0)
        costs[columns.pair + n * columns.ranks :][: columns.ranks] = UNLIKE_WEIGHT * unlike
    return costs


def _bounds(
    columns: _Columns,
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    upper, whole = np.ones(columns.width), np.ones(columns.width)
    for row, unit in enumerate(columns.units):
        upper[row * columns.ranks :][: columns.ranks] = unit.count
    whole[columns.pair :] = 0  # pairs and peak follow from the rest
    return upper, whole


def _constraints(columns: _Columns, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All pieces placed; ranks filled to at most `peak`; `present` and `pair` tell who shares a rank."""
    rows: list[np.ndarray] = []
    low: list[float] = []
    high: list[float] = []

    def add(entries: Mapping[int, float], least: float, most: float) -> None:
        row = np.zeros(columns.width)
        for column, value in entries.items():
            row[column] = value
        rows.append(row)
        low.append(least)
        high.append(most)

    ranks = range(columns.ranks)
    for u, unit in enumerate(columns.units):
        add({u * columns.ranks + r: 1.0 for r in ranks}, unit.count, unit.count)
    for r in ranks:
        filled = {u * columns.ranks + r: unit.nbytes / capacity for u, unit in enumerate(columns.units)}
        add({**filled, columns.peak: -1.0}, -np.inf, 0.0)
        for m, model in enumerate(columns.models):
            held = {u * columns.ranks + r: 1.0 for u, unit in enumerate(columns.units) if unit.model == model}
            most = sum(unit.count for unit in columns.units if unit.model == model)
            add({**held, columns.present + m * columns.ranks + r: -float(most)}, -np.inf, 0.0)
        for n, (a, b) in enumerate(columns.pairs):
            both = {columns.present + m * columns.ranks + r: 1.0 for m in (a, b)}
            add({**both, columns.pair + n * columns.ranks + r: -1.0}, -np.inf, 1.0)
    return np.array(rows), np.array(low), np.array(high)
