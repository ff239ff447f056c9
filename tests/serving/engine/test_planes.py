"""Where token rows and planes lie, in both orders and all dtypes, against plain indexing of the view."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from poolweave.serving.engine.planes import KVPlanes, torch_dtype
from poolweave.transfer import KVLayout

pytestmark = pytest.mark.engine

LAYOUTS = [
    KVLayout(num_layers=3, kv_heads=2, head_dim=4, block_tokens=8, dtype=dtype, order=order)
    for dtype in ("float32", "float16", "bfloat16")
    for order in ("aggregated", "layered")
] + [KVLayout.mla(num_layers=2, rank=6, rope=2, dtype="bfloat16", order=order) for order in ("aggregated", "layered")]
SLOTS = 5


@pytest.fixture(params=LAYOUTS, ids=lambda layout: f"{layout.order}-{layout.dtype}-{len(layout.parts)}")
def layout(request: pytest.FixtureRequest) -> KVLayout:
    return request.param


def noise(layout: KVLayout) -> tuple[Any, KVPlanes]:
    raw = np.random.default_rng(0).integers(1, 60, SLOTS * layout.block_bytes, dtype=np.uint8)  # finite in every dtype
    view = layout.view(raw, SLOTS)
    return view, KVPlanes(view, layout)


def bits(tensor: torch.Tensor, view: Any) -> Any:
    """The tensor in the element type of a view: bfloat16 as uint16."""
    return tensor.view(torch.uint16).numpy() if view.dtype == np.uint16 else tensor.numpy()


def test_gather_copies_whole_planes_in_order(layout: KVLayout) -> None:
    view, planes = noise(layout)
    slots = np.array([3, 0, 4], np.int32)
    for layer in range(layout.num_layers):
        for part in range(len(layout.parts)):
            found = planes.gather(layer, part, planes.plane_ids(slots))
            assert found.dtype == torch_dtype(layout.dtype)
            expected = view[slots, layer, part].reshape(-1, layout.kv_heads, layout.head_dim)
            assert np.array_equal(bits(found, view), expected)


def test_write_changes_these_rows_and_no_others(layout: KVLayout) -> None:
    view, planes = noise(layout)
    before = view.copy()
    slots, offsets = np.array([1, 1, 4]), np.array([0, layout.block_tokens - 1, 3])
    rows = torch.full((3, layout.kv_heads, layout.head_dim), 2.5, dtype=torch_dtype(layout.dtype))
    last = len(layout.parts) - 1
    planes.write(1, last, planes.row_ids(slots, offsets), rows)
    before[slots, 1, last, offsets] = bits(rows, view)
    assert np.array_equal(view, before)


def test_zero_tails_clears_the_rest_of_each_block(layout: KVLayout) -> None:
    view, planes = noise(layout)
    before = view.copy()
    planes.zero_tails(np.array([2, 0]), np.array([3, layout.block_tokens]))
    before[2, :, :, 3:] = 0  # slot 0 has no tail
    assert np.array_equal(view, before)


@pytest.mark.parametrize("order", ["aggregated", "layered"])
def test_a_view_of_other_memory_order_is_refused(order: Any) -> None:
    layout = KVLayout(num_layers=3, kv_heads=2, head_dim=4, dtype="float32", order=order)
    view = layout.view(np.zeros(SLOTS * layout.block_bytes, np.uint8), SLOTS)
    with pytest.raises(RuntimeError):
        KVPlanes(view[:, ::2], layout)
