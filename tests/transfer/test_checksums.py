"""Checksums of loans: of the canonical stream, made once for full blocks, always for a partial one."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from ref_block_store import ReferenceStore

from poolweave.transfer import KVLayout
from poolweave.transfer.checksums import ChecksumCache
from poolweave.transfer.regions import OwnMemory


def cache_of(order: str, num_slots: int = 8) -> tuple[ReferenceStore, ChecksumCache]:
    layout = KVLayout(num_layers=2, kv_heads=2, head_dim=8, order=order)  # type: ignore[arg-type]
    store = ReferenceStore(layout, num_slots)
    return store, ChecksumCache(OwnMemory(layout, store.regions()), 1)


@pytest.mark.parametrize("order", ["aggregated", "layered", "token_major"])
def test_they_are_xxh3_of_the_block_in_the_order_of_its_axes(order: str) -> None:
    store, cache = cache_of(order)
    blocks = store.make(3, seed=4)
    wanted = [xxhash.xxh3_64_intdigest(np.ascontiguousarray(store.view(one)).tobytes()) for one in blocks.tolist()]
    for _ in range(2):
        loan = store.lend(blocks)
        assert cache.of_loan(loan, 3).tolist() == wanted
        store.give_back(loan)
    store.close()


def test_only_full_blocks_are_remembered() -> None:
    store, cache = cache_of("aggregated")
    blocks = store.make(3)
    loan = store.lend(blocks)
    first = cache.of_loan(loan, 2)
    store.fill(blocks, seed=9)  # a store never does this to sealed blocks: here it shows what is made anew
    second = cache.of_loan(loan, 2)
    assert (first == second).tolist() == [True, True, False]
    more = store.lend(np.concatenate([blocks[:2], store.make(1, seed=7)]))
    assert (cache.of_loan(more, 3)[:2] == first[:2]).all()
    store.close()


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poolweave.transfer.checksums._MOST_KEPT", 4)
    store, cache = cache_of("aggregated", num_slots=16)
    blocks = store.make(10)
    loan = store.lend(blocks)
    first = cache.of_loan(loan, 10)
    assert len(cache._known) == 4
    assert (cache.of_loan(loan, 10) == first).all()
    store.close()
