"""Index arithmetic of a ragged step, against the rows it was made of."""

from __future__ import annotations

import numpy as np
import pytest

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
    assert batch.input_ids.tolist() == [[4, 7, 1, 2, 3]]  # decode by length, then prefill
    assert batch.positions.tolist() == [[0, 9, 3, 4, 5]]
    assert batch.last.tolist() == [1, 4, 0]  # of the rows as they were given
    places = [(6, 0), (8, 1), (20, 3), (21, 0), (21, 1)]
    expected = planes.row_ids(np.array([slot for slot, _ in places]), np.array([offset for _, offset in places]))
    assert batch.write_rows.tolist() == expected.tolist()
    [span] = batch.spans
    assert (span.begin, span.stop, span.cached, span.context) == (2, 5, 3, 6)
    assert span.places.ids.tolist() == planes.place(np.array([20, 21])).ids.tolist()


def test_decode_rows_are_padded_with_their_own_first_block_and_masked(planes: KVPlanes) -> None:
    [group] = Batch([row([1], 9, 3, 5, 8), row([1], 6, 11, 12)], planes).groups
    assert (group.begin, group.stop, group.context) == (0, 2, 10)
    assert group.places.ids.tolist() == planes.place(np.array([11, 12, 11, 3, 5, 8])).ids.tolist()
    assert group.mask is not None
    assert group.mask.view(2, 10).tolist() == [[0.0] * 7 + [float("-inf")] * 3, [0.0] * 10]


def test_decode_rows_of_one_length_need_no_mask(planes: KVPlanes) -> None:
    [group] = Batch([row([1], 9, 3, 5, 8), row([1], 9, 11, 12, 1)], planes).groups
    assert group.mask is None


def test_decode_rows_of_unlike_length_are_not_padded_to_each_other(planes: KVPlanes) -> None:
    rows = [row([1], 4 * n - 1, *range(n)) for n in (1, 9, 2, 20, 3)]
    groups = Batch(rows, planes).groups
    assert [(group.begin, group.stop, group.context) for group in groups] == [
        (0, 2, 8), (2, 3, 12), (3, 4, 36), (4, 5, 80),
    ]  # fmt: skip


def test_a_step_without_decode_or_without_prefill(planes: KVPlanes) -> None:
    prefill = Batch([row([1, 2], 0, 3), row([3, 4], 0, 5)], planes)
    assert (prefill.groups, len(prefill.spans), prefill.last.tolist()) == ([], 2, [1, 3])
    decode = Batch([row([1], 0, 3)], planes)
    assert (len(decode.groups), decode.spans, decode.last.tolist()) == (1, [], [0])
