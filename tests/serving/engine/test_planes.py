"""Where token rows and planes lie, in both orders and all dtypes, against plain indexing of the view."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from poolweave.errors import ConfigError
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


@pytest.mark.parametrize("slots", [[3, 0, 4], [2], [1, 2, 3], [3, 2, 1], [1, 1]])
def test_blocks_are_read_in_order(layout: KVLayout, slots: list[int]) -> None:
    view, planes = noise(layout)
    places = planes.place(np.array(slots, np.int32))
    for layer in range(layout.num_layers):
        found = planes.read(layer, places)
        assert found.dtype == torch_dtype(layout.dtype)
        expected = view[slots, layer].swapaxes(0, 1).reshape(len(layout.parts), -1, layout.kv_heads, layout.head_dim)
        assert np.array_equal(bits(found, view), expected)


def test_neighbouring_blocks_of_a_layered_pool_are_read_in_place(layout: KVLayout) -> None:
    view, planes = noise(layout)

    def in_place(slots: list[int]) -> bool:
        found = planes.read(1, planes.place(np.array(slots, np.int32)))
        view[slots[0], 1, 0, 0, 0, 0] += 1
        return bool(np.array_equal(bits(found, view)[0, 0, 0], view[slots[0], 1, 0, 0, 0]))

    assert in_place([1, 2, 3]) == in_place([4]) == (layout.order == "layered")
    assert not in_place([1, 3])
    assert not in_place([2, 1])


def test_write_changes_these_rows_and_no_others(layout: KVLayout) -> None:
    view, planes = noise(layout)
    before = view.copy()
    slots, offsets = np.array([1, 1, 4]), np.array([0, layout.block_tokens - 1, 3])
    shape = (len(layout.parts), 3, layout.kv_heads, layout.head_dim)
    rows = torch.arange(math.prod(shape), dtype=torch_dtype(layout.dtype)).view(shape)
    planes.write(planes.row_ids(slots, offsets)[1], rows)
    for part in range(len(layout.parts)):
        before[slots, 1, part, offsets] = bits(rows[part], view)
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


def test_tokens_that_do_not_follow_one_another_are_refused_by_name() -> None:
    layout = KVLayout(num_layers=2, kv_heads=2, head_dim=4, order="token_major")
    view = layout.view(np.zeros(3 * layout.block_bytes, np.uint8), 3)
    with pytest.raises(ConfigError, match="token_major"):
        KVPlanes(view, layout)
