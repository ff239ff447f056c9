"""Blocks: a value over handles."""

from __future__ import annotations

import numpy as np
import pytest

from poolweave.mempool import Blocks


def test_behaves_as_a_sequence_of_handles() -> None:
    blocks = Blocks.of([5, 6, 7])
    assert len(blocks) == 3
    assert list(blocks) == [5, 6, 7]
    assert blocks[1] == 6
    assert blocks[-1] == 7
    assert blocks[:2] == Blocks.of([5, 6])
    assert blocks[::2].array.flags.c_contiguous
    assert blocks[:1] + blocks[2:] == Blocks.of((5, 7))
    assert blocks != Blocks.of([5, 6])
    assert not len(Blocks.empty())
    assert Blocks.empty() + blocks == blocks
    assert blocks.array.dtype == np.uint64
    assert "5.0, 6.0, 7.0" in repr(blocks)


def test_blocks_of_two_pools_do_not_mix() -> None:
    with pytest.raises(ValueError, match="two pools"):
        Blocks.of([1], owner=1) + Blocks.of([2], owner=2)
    assert (Blocks.of([1], owner=3) + Blocks.of([2])).owner == 3
    assert Blocks.of([1], owner=1) != Blocks.of([1], owner=2)


@pytest.mark.parametrize(("bad", "error"), [([1.5], TypeError), ([True], TypeError), ([-1], OverflowError)])
def test_only_handles_are_taken(bad: list[object], error: type[Exception]) -> None:
    with pytest.raises(error):
        Blocks.of(bad)
