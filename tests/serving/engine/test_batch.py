"""Index arithmetic of a ragged step, against the rows it was made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from poolweave.serving.engine.batch import Batch, Row
from poolweave.serving.engine.planes import KVPlanes
from poolweave.transfer import KVLayout

pytestmark = pytest.mark.engine

LAYOUT = KVLayout(num_layers=2, kv_heads=1, head_dim=2, block_tokens=4, dtype="float32")
SLOTS = 30


@pytest.fixture
def planes() -> KVPlanes:
    return KVPlanes(LAYOUT.view(np.zeros(SLOTS * LAYOUT.block_bytes, np.uint8), SLOTS), LAYOUT)


def row(tokens: list[int], start: int, *slots: int) -> Row:
    return Row(tokens, start, np.array(slots, np.int32))


def test_tokens_positions_and_places_of_a_mixed_step(planes: KVPlanes) -> None:
    rows = [row([7], 9, 3, 5, 8), row([1, 2, 3], 3, 20, 21), row([4], 0, 6)]
    batch = Batch(rows, planes)
    assert batch.input_ids.tolist() == [[7, 1, 2, 3, 4]]
    assert batch.positions.tolist() == [[9, 3, 4, 5, 0]]
    assert batch.last.tolist() == [0, 3, 4]
    places = [(8, 1), (20, 3), (21, 0), (21, 1), (6, 0)]
    expected = planes.row_ids(np.array([slot for slot, _ in places]), np.array([offset for _, offset in places]))
    assert batch.write_rows.tolist() == expected.tolist()
    [span] = batch.spans
    assert (span.begin, span.stop, span.cached, span.context) == (1, 4, 3, 6)
    assert span.planes.tolist() == planes.plane_ids(np.array([20, 21])).tolist()


def test_decode_rows_are_padded_with_their_own_first_block_and_masked(planes: KVPlanes) -> None:
    [group] = Batch([row([1], 9, 3, 5, 8), row([1], 6, 11, 12)], planes).groups
    by_query = dict(zip(group.queries.tolist(), group.planes.view(2, 3), strict=True))
    assert by_query[0].tolist() == planes.plane_ids(np.array([3, 5, 8])).tolist()
    assert by_query[1].tolist() == planes.plane_ids(np.array([11, 12, 11])).tolist()
    visible = dict(zip(group.queries.tolist(), group.mask.view(2, 12).sum(1).tolist(), strict=True))
    assert visible == {0: 10, 1: 7}
    assert torch.equal(group.mask, group.mask.sort(dim=-1, descending=True).values)  # a prefix


def test_decode_rows_of_unlike_length_are_not_padded_to_each_other(planes: KVPlanes) -> None:
    rows = [row([1], 4 * n - 1, *range(n)) for n in (1, 9, 2, 20, 3)]
    groups = Batch(rows, planes).groups
    assert [sorted(len(rows[query].slots) for query in group.queries.tolist()) for group in groups] == [
        [1, 2],
        [3],
        [9],
        [20],
    ]
    for group in groups:
        read = group.mask.numel()
        assert read <= 2 * int(group.mask.sum())
