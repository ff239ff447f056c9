"""Namespaces are given back: flat in number however many identities come, and no number ever gets a second one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from poolweave.errors import ConfigError
from poolweave.index import Identity, RadixIndex

TOKENS = np.arange(32, dtype=np.int32)
FLAT = 2100  # known ones, where few are needed


def salted(n: int) -> Identity:
    return Identity(model="m", salt=str(n).encode())


def pass_by(index: RadixIndex, count: int, first: int = 0) -> set[int]:
    """So many identities that nobody holds. -> their numbers"""
    return {int(index.namespace(salted(n))) for n in range(first, first + count)}


@pytest.mark.parametrize("options", [{}, {"max_tenant_bytes": "64 KiB"}, {"keep_tenants": True}])
def test_a_hundred_thousand_identities_leave_few_behind(options: dict[str, object]) -> None:
    index = RadixIndex(**options)  # type: ignore[arg-type]
    numbers: set[int] = set()
    for n in range(100_000):
        ns = index.namespace(salted(n))
        numbers.add(int(ns))
        if n % 10 == 0:
            index.insert(TOKENS, [2 * n, 2 * n + 1], ns)
            assert index.match(TOKENS, ns).blocks.tolist() == [2 * n, 2 * n + 1]
            index.evict(2)
    assert len(numbers) == 100_000, "no number was given out twice"
    assert len(index.namespaces) <= FLAT
    assert len(index.namespaces._tenants) <= FLAT
    assert index.stats().nbytes < 1 << 20
    index.check()


def test_one_that_somebody_has_or_that_has_blocks_stays() -> None:
    index = RadixIndex()
    held = index.namespace(Identity(model="held"))
    kept = int(index.namespace(Identity(model="kept")))
    index.insert(TOKENS, [1, 2], kept)
    numbers = pass_by(index, 5000)
    assert index.namespace(Identity(model="held")) == held
    assert index.namespace(Identity(model="kept")) == index.namespace_of(Identity(model="kept").digest) == kept
    assert {int(held), kept}.isdisjoint(numbers)
    index.insert(TOKENS, [3, 4], held)
    assert index.match(TOKENS, kept).blocks.tolist() == [1, 2]
    assert index.match(TOKENS, held).blocks.tolist() == [3, 4]
    assert index.digest(kept) == Identity(model="kept").digest


def test_one_that_was_given_up_is_refused_and_its_identity_gets_a_new_number() -> None:
    index = RadixIndex()
    lone = int(index.namespace(Identity(model="lone")))
    index.insert(TOKENS, [1, 2], lone)
    index.evict(2)
    last = max(pass_by(index, 5000))
    for use in (index.require, index.digest, lambda ns: index.match(TOKENS, ns)):
        with pytest.raises(ConfigError, match=f"namespace {lone} was given up"):
            use(lone)
    with pytest.raises(ConfigError, match=f"namespace {last + 1} is not known here"):
        index.require(last + 1)
    again = index.namespace(Identity(model="lone"))
    assert again > last
    assert index.match(TOKENS, again).num_tokens == 0


def test_who_keeps_something_by_namespace_is_asked_and_told() -> None:
    class Keeper:
        def __init__(self) -> None:
            self.told: list[int] = []

        def holds(self, ns: int) -> bool:
            return ns == 1

        def gone(self, namespaces: Sequence[int]) -> None:
            self.told += namespaces

    index, keeper = RadixIndex(), Keeper()
    index.namespaces.add_holder(keeper)
    numbers = pass_by(index, 5000)
    assert len(set(keeper.told)) == len(keeper.told) == 5000 - len(index.namespaces)
    assert set(keeper.told) < numbers - {1}
    assert index.namespace(salted(0)) == 1


def test_threads_share_no_number_while_others_are_given_up() -> None:
    index = RadixIndex(keep_tenants=True)
    of: dict[int, bytes] = {}
    faults: list[str] = []

    def work(seed: int) -> None:
        for n in range(4000):
            identity = salted(n % 3000 if n % 2 else seed * 10**6 + n)
            ns = index.namespace(identity)
            if of.setdefault(int(ns), identity.digest) != identity.digest:
                faults.append(f"{ns} had another identity")
            payload = seed * 10**6 + n
            index.insert(TOKENS[:16], [payload], ns)
            if index.match(TOKENS, ns).num_tokens not in (0, 16) or index.digest(ns) != identity.digest:
                faults.append(f"{ns} is not what it was")
            if n % 7 == 0:
                index.evict(50)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults[:3]
    index.check()
