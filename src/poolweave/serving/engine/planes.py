"""A tier's view as torch tensors: where a token's row and a block's plane of one layer and part lie.

Knows no sequence and no model; it copies rows in and whole planes out, and owns no KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from poolweave.errors import ConfigError
from poolweave.transfer import KVLayout

_TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch element type of a layout's dtype."""
    return _TORCH_DTYPES[name]


@dataclass(frozen=True, slots=True)
class Places:
    """Where `num_blocks` blocks lie, for all layers: looked up once a step, read once a layer."""

    num_blocks: int
    ids: torch.Tensor  # [layers, parts * num_blocks] planes
    run: int | None  # the first slot of blocks that can be read without a copy


class KVPlanes:
    """The memory of one tier, seen as a matrix of token rows and as a matrix of planes.

        token row:  the `heads * dim` numbers of one token, layer and part
        plane:      the `block_tokens` consecutive token rows of one block, layer and part

    Both orders of a layout are such a matrix; only the distance between planes differs:

        aggregated: plane = slot * num_planes + (layer * num_parts + part)
        layered:    plane = (layer * num_parts + part) * num_slots + slot

    In the layered order, blocks in neighbouring slots are one stretch of token rows a layer and part: they are read in
    place. In the aggregated order other layers lie between them, and a strided read of small matrices costs more than
    copying the planes together (benchmarks/bench_engine.py).
    """

    def __init__(self, view: npt.NDArray[Any], layout: KVLayout) -> None:
        """Wrap `view` [slots, layers, parts, block_tokens, heads, dim] without a copy; it must outlive this object.

        Raises ConfigError for the order token_major, in which the tokens of a plane do not follow one another.
        """
        if layout.order == "token_major":
            raise ConfigError(
                "the engine reads planes of consecutive tokens, which order 'token_major' does not have; use "
                "'aggregated' or 'layered'",
                setting="order",
                value=layout.order,
            )
        num_slots = view.shape[0]
        tensor = torch.from_numpy(view)
        if layout.dtype == "bfloat16":
            tensor = tensor.view(torch.bfloat16)
        self._layered = layout.order == "layered"
        if self._layered:
            tensor = tensor.permute(1, 2, 0, 3, 4, 5)
        self._tensor = tensor
        self._rows = tensor.view(-1, layout.kv_heads * layout.head_dim)
        self._planes = tensor.view(-1, layout.block_tokens * layout.kv_heads * layout.head_dim)
        self._layout = layout
        self._slot_stride = 1 if self._layered else layout.num_planes
        plane_stride = num_slots if self._layered else 1
        self._shifts = (torch.arange(layout.num_planes) * plane_stride).view(layout.num_layers, -1, 1)  # [L, P, 1]

    @property
    def num_parts(self) -> int:
        return len(self._layout.parts)

    @property
    def block_tokens(self) -> int:
        return self._layout.block_tokens

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._rows.dtype
        return dtype

    def place(self, slots: npt.NDArray[Any]) -> Places:
        """Find the planes of the blocks in `slots` [n]."""
        first = torch.from_numpy(slots.astype(np.int64) * self._slot_stride)
        run = int(slots[0]) if self._layered and is_run(slots) else None
        return Places(len(slots), (self._shifts + first).flatten(1), run)

    def row_ids(self, slots: npt.NDArray[Any], offsets: npt.NDArray[Any]) -> torch.Tensor:
        """The token rows at `offsets` [n] within each slot's block: [layers, parts * n]."""
        first = torch.from_numpy(slots.astype(np.int64) * (self._slot_stride * self.block_tokens) + offsets)
        return (self._shifts * self.block_tokens + first).flatten(1)

    def write(self, row_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Store `rows` [parts, n, ...] at one layer's `row_ids` [parts * n]."""
        self._rows.index_copy_(0, row_ids, rows.reshape(len(row_ids), -1))

    def read(self, layer: int, places: Places) -> torch.Tensor:
        """The tokens of blocks, in order: [parts, num_blocks * block_tokens, heads, dim].

        In place for a run, else a copy.
        """
        if places.run is not None:
            return self._tensor[layer, :, places.run : places.run + places.num_blocks].flatten(1, 2)
        planes = self._planes.index_select(0, places.ids[layer])
        return planes.view(self.num_parts, -1, self._layout.kv_heads, self._layout.head_dim)

    def zero_tails(self, slots: npt.NDArray[Any], starts: npt.NDArray[Any]) -> None:
        """Zero the tokens from `starts` (within the block) to the end of each slot's block, all layers and parts.

        A masked score still multiplies the value beside it, and 0 * NaN is NaN: a block that is read before it is
        full must hold numbers.
        """
        offsets = np.arange(self.block_tokens)
        owners, tail = np.nonzero(offsets >= starts[:, None])
        self._rows.index_fill_(0, self.row_ids(slots[owners], tail).flatten(), 0)


def is_run(slots: npt.NDArray[Any]) -> bool:
    """Whether slots follow one another upwards."""
    return bool((np.diff(slots) == 1).all())
