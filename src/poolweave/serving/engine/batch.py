"""One ragged forward: the new tokens of several sequences in one flattened row. Plain index arithmetic, no model.

tokens of a step   | decode tokens, by context length | prefill chunk     | prefill chunk      |
positions            7, 41, 40, 530                     [32 .. 95]          [0 .. 21]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from poolweave.serving.engine.hooks import HookCall
from poolweave.serving.engine.planes import KVPlanes, Places
from poolweave.types import Int32Array


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence's part of a step: new `tokens` at positions [start, end); `slots` are its blocks' rows up to `end`."""

    tokens: Sequence[int]
    start: int
    slots: Int32Array

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Span:
    """A prefill chunk: queries [begin, stop) of the flattened row attend to positions [0, context)."""

    begin: int
    stop: int
    context: int
    places: Places

    @property
    def length(self) -> int:
        return self.stop - self.begin

    @property
    def cached(self) -> int:
        """Positions computed before this step."""
        return self.context - self.length


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single-token rows [begin, stop) of like context length, attended to together.

    `places` are their blocks, each row's filled up to the same number with its own first one. `mask` is added to
    scores: -inf where a row has no such position; None when all have the same `context`.
    """

    begin: int
    stop: int
    context: int
    places: Places
    mask: torch.Tensor | None  # [n, 1, 1, context]

    def __len__(self) -> int:
        return self.stop - self.begin


class Batch:
    """The tensors of one step. Built once, read by every layer."""

    def __init__(self, rows: Sequence[Row], planes: KVPlanes, hooks: Sequence[HookCall] = ()) -> None:
        """Rows are non-empty and their slots cover their positions. `last` keeps their order, the forward does not."""
        self.hooks = hooks
        decode = sorted((i for i, row in enumerate(rows) if len(row.tokens) == 1), key=lambda i: len(rows[i].slots))
        order = decode + [i for i, row in enumerate(rows) if len(row.tokens) > 1]
        ordered = [rows[i] for i in order]
        ends = np.cumsum([len(row.tokens) for row in ordered])
        positions = np.concatenate([np.arange(row.start, row.end) for row in ordered])
        block_tokens = planes.block_tokens
        slots = np.concatenate([row.slots[np.arange(row.start, row.end) // block_tokens] for row in ordered])
        self.planes = planes
        self.input_ids = torch.tensor([token for row in ordered for token in row.tokens]).unsqueeze(0)  # [1, Q]
        self.positions = torch.from_numpy(positions).unsqueeze(0)  # [1, Q]
        self.write_rows = planes.row_ids(slots, positions % block_tokens)  # [layers, parts * Q]
        self.last = torch.from_numpy((ends - 1)[np.argsort(order)])  # [len(rows)]: whose logits are wanted
        self.groups = [_group(ordered[begin:stop], begin, planes) for begin, stop in _alike(ordered[: len(decode)])]
        self.spans = [
            Span(int(end) - len(row.tokens), int(end), row.end, planes.place(row.slots))
            for end, row in zip(ends[len(decode) :], ordered[len(decode) :], strict=True)
        ]


def _alike(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Cut rows, sorted by length, so that padding at most doubles what a group reads."""
    cuts = [0]
    for index, row in enumerate(rows):
        if len(row.slots) > 2 * len(rows[cuts[-1]].slots):
            cuts.append(index)
    return list(zip(cuts, [*cuts[1:], len(rows)], strict=True)) if rows else []


def _group(rows: Sequence[Row], begin: int, planes: KVPlanes) -> DecodeGroup:
    num_blocks = len(rows[-1].slots)
    slots = [np.pad(row.slots, (0, num_blocks - len(row.slots)), constant_values=row.slots[0]) for row in rows]
    ends = np.array([row.end for row in rows])
    context = int(ends.max())
    mask = None
    if (ends != context).any():
        absent = torch.from_numpy(np.arange(context) >= ends[:, None])
        mask = torch.zeros(absent.shape, dtype=planes.dtype).masked_fill_(absent, float("-inf"))[:, None, None]
    return DecodeGroup(begin, begin + len(rows), context, planes.place(np.concatenate(slots)), mask)
