"""A tier's view as torch tensors: where a token's row and a block's plane of one layer and part lie.

Knows no sequence and no model; it copies rows in and whole planes out, and owns no KV.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from poolweave.transfer import KVLayout

_TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch element type of a layout's dtype."""
    return _TORCH_DTYPES[name]


class KVPlanes:
    """The memory of one tier, seen as a matrix of token rows and as a matrix of planes.

        token row:  the `heads * dim` numbers of one token, layer and part
        plane:      the `block_tokens` consecutive token rows of one block, layer and part

    Both orders of a layout are such a matrix; only the distance between planes differs:

        aggregated: plane = slot * num_planes + (layer * num_parts + part)
        layered:    plane = (layer * num_parts + part) * num_slots + slot
    """

    def __init__(self, view: npt.NDArray[Any], layout: KVLayout) -> None:
        """Wrap `view` [slots, layers, parts, block_tokens, heads, dim] without a copy; it must outlive this object."""
        num_slots = view.shape[0]
        tensor = torch.from_numpy(view)
        if layout.dtype == "bfloat16":
            tensor = tensor.view(torch.bfloat16)
        if layout.order == "layered":
            tensor = tensor.permute(1, 2, 0, 3, 4, 5)
        self._rows = tensor.view(-1, layout.kv_heads * layout.head_dim)
        self._planes = tensor.view(-1, layout.block_tokens * layout.kv_heads * layout.head_dim)
        self._layout = layout
        aggregated = layout.order == "aggregated"
        self._slot_stride = layout.num_planes if aggregated else 1
        self._plane_stride = 1 if aggregated else num_slots

    @property
    def num_parts(self) -> int:
        return len(self._layout.parts)

    @property
    def block_tokens(self) -> int:
        return self._layout.block_tokens

    def plane_ids(self, slots: npt.NDArray[Any]) -> torch.Tensor:
        """The plane of layer 0, part 0 of each slot: int64, the shape of `slots`."""
        return torch.from_numpy(slots.astype(np.int64) * self._slot_stride)

    def row_ids(self, slots: npt.NDArray[Any], offsets: npt.NDArray[Any]) -> torch.Tensor:
        """The token row of layer 0, part 0 at `offsets` within each slot's block."""
        return torch.from_numpy(slots.astype(np.int64) * (self._slot_stride * self.block_tokens) + offsets)

    def write(self, layer: int, part: int, row_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Store `rows` [n, heads, dim] (or [n, heads * dim]) at `row_ids` [n] of this layer and part."""
        shift = self._shift(layer, part) * self.block_tokens
        self._rows.index_copy_(0, row_ids + shift, rows.reshape(len(row_ids), -1))

    def gather(self, layer: int, part: int, plane_ids: torch.Tensor) -> torch.Tensor:
        """A copy of whole planes, in order: [n] ids -> [n * block_tokens, heads, dim]."""
        planes = self._planes.index_select(0, plane_ids + self._shift(layer, part))
        return planes.view(-1, self._layout.kv_heads, self._layout.head_dim)

    def zero_tails(self, slots: npt.NDArray[Any], starts: npt.NDArray[Any]) -> None:
        """Zero the tokens from `starts` (within the block) to the end of each slot's block, all layers and parts.

        A masked score still multiplies the value beside it, and 0 * NaN is NaN: a block that is read before it is
        full must hold numbers.
        """
        tail = [
            (slot, offset)
            for slot, start in zip(slots, starts, strict=True)
            for offset in range(start, self.block_tokens)
        ]
        if not tail:
            return
        pairs = np.array(tail, dtype=np.int64)
        first = self.row_ids(pairs[:, 0], pairs[:, 1])
        shifts = torch.arange(self._layout.num_planes) * (self._plane_stride * self.block_tokens)
        self._rows.index_fill_(0, (first[:, None] + shifts).flatten(), 0)

    def _shift(self, layer: int, part: int) -> int:
        return (layer * self.num_parts + part) * self._plane_stride
