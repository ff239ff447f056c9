"""Quotas: a tenant over its own takes from nobody else (C37), and no cap is passed, not for a moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from poolweave.errors import AllocTimeout, ConfigError, OutOfBlocks, QuotaExceeded, TransferFailed
from poolweave.index import Identity
from poolweave.mempool import Blocks, MemPool, Quota, Quotas
from poolweave.types import Tier

MakePool = Callable[..., MemPool]
BLOCK = 512
A, B = Identity(salt=b"a"), Identity(salt=b"b")


def history(pool: MemPool, first: int, num_blocks: int, ns: int) -> list[int]:
    tokens = list(range(first, first + 4 * num_blocks))
    blocks = pool.alloc(num_blocks, ns=ns)
    pool.seal(blocks)
    pool.insert(tokens, blocks, ns)
    pool.free(blocks)
    return tokens


def matched(pool: MemPool, tokens: list[int], ns: int) -> int:
    with pool.match(tokens, ns) as hit:
        return hit.num_tokens // 4


def test_c37_a_tenant_over_its_quota_gives_up_its_own(make_pool: MakePool) -> None:
    pool = make_pool(16, quotas=Quotas(named={b"a": Quota(hbm=6 * BLOCK)}))
    a, b = pool.namespace(A), pool.namespace(B)
    theirs = history(pool, 1000, 8, b)
    old, new = history(pool, 0, 3, a), history(pool, 100, 3, a)
    held = pool.alloc(2, ns=a)  # its own oldest go, though 2 blocks of the pool are free
    assert pool.stats().tiers[Tier.HBM].free == 2
    assert (matched(pool, old, a), matched(pool, new, a), matched(pool, theirs, b)) == (1, 3, 8)
    with pytest.raises(QuotaExceeded, match=r"quota\.hbm") as caught:
        pool.alloc(7, ns=a)
    assert (caught.value.needed, caught.value.limit, caught.value.setting) == (7, 6, "quota.hbm")
    more = pool.alloc(4, ns=a)
    with pytest.raises(QuotaExceeded, match="6 of at most 6") as caught:
        pool.alloc(1, ns=a)
    assert (caught.value.free, caught.value.evictable, caught.value.pinned) == (0, 0, 6)
    assert isinstance(caught.value, OutOfBlocks)
    assert matched(pool, theirs, b) == 8  # B has what it had, and may have more
    pool.free(pool.alloc(2, ns=b))
    stats = pool.stats()
    assert stats.tenants[a].used == (6, 0)
    assert stats.tenants[a].limit == (6, None)
    assert stats.events["over_quota"] == 6
    assert stats.events["over_quota_refused"] == 2
    pool.free(held + more)
    assert pool.stats().tenants[a].blocks == 0


def test_nothing_is_given_up_for_what_cannot_be_met(make_pool: MakePool) -> None:
    pool = make_pool(16, quotas=Quotas(each=Quota(total=6 * BLOCK)))
    a = pool.namespace(A)
    kept = history(pool, 0, 3, a)
    held = pool.alloc(3, ns=a)
    with pytest.raises(QuotaExceeded, match=r"quota\.total"):
        pool.alloc(4, ns=a)
    assert matched(pool, kept, a) == 3
    pool.free(held)


def test_history_over_the_cap_of_hbm_is_demoted_up_to_that_of_dram(make_pool: MakePool) -> None:
    pool = make_pool(16, 16, quotas=Quotas(each=Quota(hbm=4 * BLOCK, dram=3 * BLOCK)))
    a = pool.namespace(A)
    prompts = [history(pool, first, 2, a) for first in (0, 100, 200, 300, 400)]
    assert pool.stats().tenants[a].used[0] <= 4
    assert pool.stats().tenants[a].used[1] <= 3
    assert [matched(pool, prompt, a) for prompt in prompts[-2:]] == [2, 2]
    with pool.match(prompts[2], a) as hit:  # partly in DRAM: HBM's cap holds for promotion too
        away = int((hit.tiers == Tier.DRAM.value).sum())
        assert away
        with pool.match(prompts[3], a) as one, pool.match(prompts[4], a) as two:
            assert len(one.blocks) + len(two.blocks) == 4
            with pytest.raises(QuotaExceeded):
                pool.swap_in(hit.blocks)
        assert pool.swap_in(hit.blocks) == away
    assert pool.stats().tenants[a].used[0] <= 4
    pool.swap_out(16)
    assert pool.stats().tenants[a].used[1] <= 3


def test_a_total_counts_blocks_in_both_tiers(make_pool: MakePool) -> None:
    pool = make_pool(8, 8, quotas=Quotas(each=Quota(total=5 * BLOCK)))
    a = pool.namespace(A)
    first, second = history(pool, 0, 2, a), history(pool, 100, 3, a)
    assert pool.swap_out(2) == 2  # a move changes no total
    held = pool.alloc(3, Tier.HBM, ns=a)
    assert pool.stats().tenants[a].blocks == 5
    assert matched(pool, first, a) + matched(pool, second, a) == 2
    pool.free(held)


def test_no_cap_is_passed_within_a_burst(make_pool: MakePool) -> None:
    pool = make_pool(64, 16, quotas=Quotas(each=Quota(hbm=10 * BLOCK, total=14 * BLOCK)))
    namespaces = [pool.namespace(Identity(salt=bytes([tenant]))) for tenant in range(3)]
    done, worst = threading.Event(), []

    def watch() -> None:
        while not done.is_set():
            tenants = pool.stats().tenants.values()
            worst.append((max(t.used[0] for t in tenants), max(t.blocks for t in tenants)))

    def burst(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for step in range(250):
            ns = namespaces[int(rng.integers(3))]
            try:
                blocks = pool.alloc(int(rng.integers(1, 6)), Tier(int(rng.integers(1, 4))), ns=ns)
            except OutOfBlocks:
                continue
            pool.seal(blocks)
            if step % 2:
                pool.insert(rng.integers(0, 2**31, 4 * len(blocks), np.int32), blocks, ns)
            pool.free(blocks)

    threads = [threading.Thread(target=burst, args=(seed,)) for seed in range(4)]
    watcher = threading.Thread(target=watch)
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watcher.join()
    assert max(hbm for hbm, _ in worst) <= 10
    assert max(total for _, total in worst) <= 14
    assert pool.stats().events["over_quota"] > 0
    pool.check()


def test_one_that_waits_for_its_quota_holds_up_nobody(make_pool: MakePool) -> None:
    pool = make_pool(8, quotas=Quotas(named={b"a": Quota(hbm=2 * BLOCK)}))
    a, b = pool.namespace(A), pool.namespace(B)
    mine, theirs = pool.alloc(2, ns=a), pool.alloc(6, ns=b)
    got: dict[str, Blocks] = {}

    def wait(name: str, num_blocks: int, ns: int) -> None:
        got[name] = pool.alloc(num_blocks, timeout=60, ns=ns)

    first = threading.Thread(target=wait, args=("a", 2, a))
    first.start()
    until(lambda: pool.stats().waiting == 1)
    second = threading.Thread(target=wait, args=("b", 3, b))
    second.start()
    until(lambda: pool.stats().waiting == 2)
    pool.free(theirs)
    second.join(60)
    assert len(got["b"]) == 3
    assert "a" not in got
    pool.free(mine)
    first.join(60)
    assert len(got["a"]) == 2
    with pytest.raises(AllocTimeout):
        pool.alloc(1, timeout=0, ns=a)
    pool.free(got["a"] + got["b"])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_blocks_that_arrive_are_paid_by_the_tenant_they_are_for(make_pool: MakePool) -> None:
    sender = make_pool(8)
    receiver = make_pool(8, quotas=Quotas(named={b"a": Quota(hbm=2 * BLOCK)}))
    sender.connect(receiver.instance, receiver.address)
    receiver.namespace(A)
    ns = sender.namespace(A)
    blocks = sender.alloc(3)
    sender.seal(blocks)
    tokens = list(range(12))
    refused = sender.transfer_with_insert(receiver.instance, blocks, tokens, ns, tag=b"1")
    with pytest.raises(TransferFailed, match="quota"):
        refused.result(30)
    sender.transfer_with_insert(receiver.instance, blocks[:2], tokens[:8], ns, tag=b"2").result(30)
    receiver.receive(b"2", timeout=30).close()
    assert receiver.stats().tenants[receiver.namespace(A)].blocks == 2
    sender.free(blocks)


def test_quotas_that_are_no_sizes_are_refused(make_pool: MakePool) -> None:
    with pytest.raises(ConfigError, match=r"quota\.hbm"):
        make_pool(8, quotas=Quotas(each=Quota(hbm="much")))
    assert "salt" not in repr(Quotas(named={b"salt": Quota()}))


def test_a_namespace_known_by_its_digest_only_is_a_tenant_of_its_own(make_pool: MakePool) -> None:
    pool = make_pool(8, quotas=Quotas(each=Quota(hbm=2 * BLOCK)))
    ns = pool._space.index.namespace_of(A.digest)
    blocks = pool.alloc(2, ns=ns)
    with pytest.raises(QuotaExceeded):
        pool.alloc(1, ns=ns)
    pool.free(pool.alloc(2, ns=pool.namespace(B)))
    pool.free(blocks)
