"""What the workers of an engine did when: stages as the board keeps them, and as a Chrome trace (Perfetto reads it)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from poolweave.crosspool_engine._native import Board
from poolweave.crosspool_engine.config import EngineConfig

_FFN = 8  # of the native board: FFN rank r is worker 8 + r


@dataclass(frozen=True, slots=True)
class StageRun:
    """One stage: a layer's attention or FFN, or a sampling turn (`layer` is then the model's number of layers).

    Times are monotonic nanoseconds, the same clock in all workers.
    """

    worker: str
    start_ns: int
    end_ns: int
    slot: int
    model: str
    layer: int
    rows: int


def read_stages(board: Board, config: EngineConfig, models: Mapping[int, str]) -> tuple[StageRun, ...]:
    """The last stages of every worker, by start. `models`: names by number on the board."""
    workers = {f"attention-{rank}": rank for rank in range(config.attention_ranks)}
    workers |= {f"ffn-{rank}": _FFN + rank for rank in range(config.ffn_ranks)}
    found = [
        StageRun(name, start, end, slot, models.get(model, "?"), layer, rows)
        for name, number in workers.items()
        for start, end, slot, model, layer, rows in board.events(number).tolist()
    ]
    return tuple(sorted(found, key=lambda stage: stage.start_ns))


def overlap(stages: Sequence[StageRun]) -> float:
    """The part of the time in which any worker computed when two or more did."""
    edges = sorted([(s.start_ns, 1) for s in stages] + [(s.end_ns, -1) for s in stages])
    busy = together = working = 0
    for (at, step), (following, _) in itertools.pairwise(edges):
        working += step
        busy += (following - at) * (working > 0)
        together += (following - at) * (working > 1)
    return together / busy if busy else 0.0


def write_chrome_trace(stages: Sequence[StageRun], path: Path) -> None:
    """One row a worker, one slice a stage; open it in ui.perfetto.dev or chrome://tracing."""
    rows = {name: number for number, name in enumerate(sorted({stage.worker for stage in stages}))}
    first = min((stage.start_ns for stage in stages), default=0)
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}}
        for name, number in rows.items()
    ]
    events += [
        {
            "ph": "X", "pid": 0, "tid": rows[stage.worker], "name": f"{stage.model} layer {stage.layer}",
            "cat": stage.model, "ts": (stage.start_ns - first) / 1e3, "dur": (stage.end_ns - stage.start_ns) / 1e3,
            "args": {"slot": stage.slot, "rows": stage.rows},
        }
        for stage in stages
    ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))
