"""One ragged forward: the new tokens of several sequences in one flattened row. Plain index arithmetic, no model.

tokens of a step   | row 0: one decode token | row 1: a prefill chunk  | row 2: one decode token |
positions            41                        [32 .. 95]                7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from poolweave.serving.engine.planes import KVPlanes
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
    """A prefill chunk: queries [begin, begin + length) of the flattened row attend to positions [0, context)."""

    begin: int
    length: int
    context: int
    planes: torch.Tensor  # [ceil(context / block_tokens)]

    @property
    def stop(self) -> int:
        return self.begin + self.length

    @property
    def cached(self) -> int:
        """Positions computed before this step."""
        return self.context - self.length


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single-token rows of like context length, attended to together; padding is a row's own first block, masked."""

    queries: torch.Tensor  # [n] indices into the flattened row
    planes: torch.Tensor  # [n * num_blocks]
    mask: torch.Tensor  # [n, 1, 1, num_blocks * block_tokens], True where a position exists

    def __len__(self) -> int:
        return len(self.queries)


class Batch:
    """The tensors of one step. Built once, read by every layer."""

    def __init__(self, rows: Sequence[Row], planes: KVPlanes) -> None:
        """Raises nothing: rows are non-empty and their slots cover their positions, which the batcher sees to."""
        lengths = np.array([len(row.tokens) for row in rows])
        ends = np.cumsum(lengths)
        positions = np.concatenate([np.arange(row.start, row.end) for row in rows])
        block_tokens = planes.block_tokens
        slots = np.concatenate([row.slots[np.arange(row.start, row.end) // block_tokens] for row in rows])
        self.planes = planes
        self.input_ids = torch.tensor([token for row in rows for token in row.tokens]).unsqueeze(0)  # [1, Q]
        self.positions = torch.from_numpy(positions).unsqueeze(0)  # [1, Q]
        self.write_rows = planes.row_ids(slots, positions % block_tokens)  # [Q]
        self.last = torch.from_numpy(ends - 1)  # [len(rows)]: whose logits are wanted
        begins = ends - lengths
        self.spans = [
            Span(int(begin), len(row.tokens), row.end, planes.plane_ids(row.slots))
            for begin, row in zip(begins, rows, strict=True)
            if len(row.tokens) > 1
        ]
        decoding = [(int(begin), row) for begin, row in zip(begins, rows, strict=True) if len(row.tokens) == 1]
        self.groups = [_group(members, planes) for members in _alike(decoding)]


def _alike(decoding: list[tuple[int, Row]]) -> list[list[tuple[int, Row]]]:
    """Rows split by context length so that padding at most doubles what a group reads."""
    groups: list[list[tuple[int, Row]]] = []
    for begin, row in sorted(decoding, key=lambda item: len(item[1].slots)):
        if groups and len(row.slots) <= 2 * len(groups[-1][0][1].slots):
            groups[-1].append((begin, row))
        else:
            groups.append([(begin, row)])
    return groups


def _group(members: list[tuple[int, Row]], planes: KVPlanes) -> DecodeGroup:
    num_blocks = max(len(row.slots) for _, row in members)
    slots = np.stack(
        [np.pad(row.slots, (0, num_blocks - len(row.slots)), constant_values=row.slots[0]) for _, row in members]
    )
    ends = np.array([row.end for _, row in members])
    mask = np.arange(num_blocks * planes.block_tokens) < ends[:, None]
    return DecodeGroup(
        queries=torch.tensor([begin for begin, _ in members]),
        planes=planes.plane_ids(slots.reshape(-1)),
        mask=torch.from_numpy(mask)[:, None, None],
    )
