"""KV written and read through an arena's file where pages lie scattered, split at page breaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poolweave.crosspool_engine import BroughtKv
from poolweave.crosspool_engine.kv_memory import KvMemory
from poolweave.mempool import Arena
from poolweave.transfer.layout import KVLayout


@pytest.mark.parametrize("head_dim", [8, 40, 300], ids=["shares a page", "straddles pages", "spans pages"])
def test_what_the_host_writes_the_range_shows_and_back(head_dim: int) -> None:
    layout = KVLayout(num_layers=3, kv_heads=1, head_dim=head_dim, block_tokens=4, dtype="float32")
    arena = Arena("2MiB", page_bytes=4096)
    other, span = arena.reserve("1MiB"), arena.reserve("1MiB")
    for page in range(0, 64, 2):  # other pages between, so that neighbours lie apart
        span.map(page, 1)
        other.map(page, 1)
        span.map(page + 1, 1)
    memory = KvMemory(layout, arena.descriptors[0], 4096, lambda pages: [span.page_at(page) for page in pages])
    num_slots = 64 * 4096 // layout.block_bytes
    view = layout.view(span.buffer(), num_slots)
    rng = np.random.default_rng(0)
    blocks = [int(b) for b in rng.permutation(num_slots)[:4]]
    rows = rng.standard_normal((4, 3, 2, 4, 1, head_dim)).astype(np.float32)
    memory.write(blocks, rows)
    np.testing.assert_array_equal(view[blocks], rows)
    assert not np.delete(view, blocks, axis=0).any()
    np.testing.assert_array_equal(memory.read(blocks), rows)
    assert memory.read([]).shape == (0, 3, 2, 4, 1, head_dim)


@pytest.mark.parametrize("order", ["aggregated", "layered", "token_major"])
def test_blocks_are_brought_from_where_a_pool_has_them(order: Any) -> None:
    layout = KVLayout(num_layers=3, kv_heads=4, head_dim=8, block_tokens=4, dtype="float32", order=order)
    view = layout.view(np.random.default_rng(1).integers(0, 255, 9 * layout.block_bytes, np.uint8), 9)
    brought = BroughtKv(view, np.array([7, 2, 8, 0], np.int32))
    assert (len(brought), brought.shape, brought.dtype) == (4, (4, *view.shape[1:]), view.dtype)
    for heads in (range(4), range(1, 3)):
        got = list(brought.blocks(1, heads))
        assert all(block.flags.c_contiguous for block in got)
        wanted = view[[2, 8, 0]][..., heads.start : heads.stop, :]
        np.testing.assert_array_equal(np.stack(got).view(np.uint32), np.ascontiguousarray(wanted).view(np.uint32))
    in_place = next(brought.blocks(0, range(4)))
    assert np.shares_memory(in_place, view) == (order == "aggregated")
