"""Quotas: a tenant over its own takes from nobody else (C37), and no cap is passed, not for a moment."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import psutil
import pytest
from ref_waiting import until

from poolweave.errors import AllocTimeout, ConfigError, OutOfBlocks, QuotaExceeded
from poolweave.index import Identity, tenant_digest
from poolweave.mempool import Blocks, MemPool, Quota, Quotas, TenantStats
from poolweave.transfer import Incoming
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


def test_a_reservation_is_paid_for_by_its_tenant(make_pool: MakePool) -> None:
    receiver, sender = make_pool(16, quotas=Quotas(named={b"a": Quota(hbm=6 * BLOCK)})), make_pool(8)
    sender.connect(receiver.instance, receiver.address)
    ours, theirs = sender.namespace(A), receiver.namespace(A)
    dst = sender.reserve(receiver.instance, 4, ns=ours)
    assert receiver.stats().tenants[theirs].used == (4, 0)
    with pytest.raises(QuotaExceeded, match=r"quota\.hbm"):
        sender.reserve(receiver.instance, 7, ns=ours)
    sender.reserve(receiver.instance, 8)  # nobody's: the pool has them
    tokens, blocks = list(range(8)), sender.alloc(2)
    sender.seal(blocks)
    sender.transfer_with_insert(receiver.instance, blocks, tokens, ours, dst=dst).result(60)
    assert receiver.stats().tenants[theirs].used == (2, 0)
    assert matched(receiver, tokens, theirs) == 2


def test_a_tenant_that_is_not_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quotas\.named is bytes, got str"):
        Quotas(named={"a": Quota(hbm=1)})  # type: ignore[dict-item]


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
    with pytest.raises(QuotaExceeded, match=r"quota\.hbm") as caught:
        refused.result(30)
    assert (caught.value.needed, caught.value.limit) == (3, 2)
    sender.transfer_with_insert(receiver.instance, blocks[:2], tokens[:8], ns, tag=b"2").result(30)
    receiver.receive(b"2", timeout=30).close()
    assert receiver.stats().tenants[receiver.namespace(A)].blocks == 2
    sender.free(blocks)


def offered(sender: MemPool, receiver: MemPool, first: int, ns: int, num_blocks: int) -> None:
    """Send a prompt of its own, to be indexed there and held by nobody."""
    blocks = sender.alloc(num_blocks)
    sender.seal(blocks)
    tokens = list(range(first, first + 4 * num_blocks))
    sender.transfer_with_insert(receiver.instance, blocks, tokens, ns).result(30)
    sender.free(blocks)


def charged(pool: MemPool) -> list[TenantStats]:
    """Accounts that have blocks."""
    return [one for one in pool.stats().tenants.values() if one.blocks]


@pytest.mark.parametrize("ahead", [True, False], ids=["the receiver knows it", "by what the sender says"])
def test_the_salts_of_one_tenant_share_its_quota_where_their_kv_is_sent(make_pool: MakePool, ahead: bool) -> None:
    sender = make_pool(12)
    receiver = make_pool(12, quotas=Quotas(named={b"key": Quota(hbm=3 * BLOCK)}, each=Quota(hbm=2 * BLOCK)))
    sender.connect(receiver.instance, receiver.address)
    salted = [Identity(model="m", salt=bytes([salt]), tenant=b"key") for salt in range(4)]
    held = [receiver.namespace(one) for one in salted] if ahead else []
    for number, one in enumerate(salted):
        offered(sender, receiver, 100 * number, sender.namespace(one), 1)
    (account,) = charged(receiver)
    assert (account.used, account.historical, account.limit) == ((3, 0), (3, 0), (3, None))
    found = [receiver.match(list(range(100 * at, 100 * at + 4)), receiver.namespace(salted[at])) for at in range(4)]
    assert [hit.num_tokens for hit in found] == [0, 4, 4, 4], "the oldest of all its salts made room"
    for hit in found:
        hit.close()
    offered(sender, receiver, 900, sender.namespace(B), 2)  # its salt is its tenant
    assert sorted(one.blocks for one in charged(receiver)) == [2, 3]
    assert len(held) in (0, 4)
    receiver.check()


def test_a_pool_passes_on_whose_it_was_told_that_kv_is(make_pool: MakePool) -> None:
    first, second = make_pool(8), make_pool(8)
    third = make_pool(8, quotas=Quotas(each=Quota(hbm=2 * BLOCK)))
    first.connect(second.instance, second.address)
    second.connect(third.instance, third.address)
    namespaces = []
    for salt in (b"1", b"2"):
        ns = first.namespace(Identity(model="m", salt=salt, tenant=b"key"))
        offered(first, second, salt[0], ns, 2)
        namespaces.append(second.namespace_of(first.digest(ns)))
        assert second.tenant(namespaces[-1]) == first.tenant(ns) == tenant_digest(b"key")
        with second.match(list(range(salt[0], salt[0] + 8)), namespaces[-1]) as hit:
            blocks = hit.take()
        second.transfer_with_insert(third.instance, blocks, list(range(salt[0], salt[0] + 8)), namespaces[-1]).result(
            30
        )
        second.free(blocks)
    (account,) = charged(third)
    assert account.blocks == 2


def test_whose_it_is_outlives_a_namespace_that_is_given_up_while_its_kv_is_on_its_way(make_pool: MakePool) -> None:
    pool = make_pool(8)
    one = Identity(model="m", salt=b"s", tenant=b"key")
    tokens = np.arange(8, dtype=np.int32)
    incoming = Incoming(
        num_blocks=2, num_tokens=8, identity=one.digest, tenant=one.tenant_digest, tokens=tokens, insert=True
    )
    placement = pool._store.place(incoming)
    first = pool.namespace_of(one.digest)
    number = int(first)
    del first
    for other in range(2000):  # nobody holds these
        pool.namespace_of(other.to_bytes(16, "little"))
    with pytest.raises(ConfigError, match="was given up"):
        pool.tenant(number)
    pool._store.release(pool._store.commit(placement))
    ns = pool.namespace_of(one.digest)
    assert pool.tenant(ns) == one.tenant_digest
    assert matched(pool, tokens.tolist(), ns) == 2
    pool.check()


def test_the_first_tenant_that_is_told_counts(make_pool: MakePool) -> None:
    pool = make_pool(8, quotas=Quotas(each=Quota(hbm=2 * BLOCK)))
    ns = pool.namespace(Identity(model="m", salt=b"s", tenant=b"one"))
    assert pool.namespace(Identity(model="m", salt=b"s", tenant=b"two")) == ns
    assert pool.tenant(ns) == tenant_digest(b"one")
    unsaid = pool.namespace_of(bytes(16))
    assert pool.tenant(unsaid) == b""
    with pytest.raises(ConfigError, match="a tenant's digest has 16 bytes, got 3"):
        pool._space.index.namespace_of(bytes(range(16)), b"key")


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


def rss() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize(
    "quotas",
    [
        None,
        Quotas(named={b"7": Quota(hbm=8 * BLOCK)}),
        pytest.param(Quotas(each=Quota(hbm=BLOCK)), marks=pytest.mark.slow),
    ],
)
def test_a_hundred_thousand_tenants_pass_through_a_pool_in_flat_memory(
    make_pool: MakePool, quotas: Quotas | None
) -> None:
    """One block of history each, of which 16 fit. The last ones find theirs, and nobody another's."""
    pool = make_pool(16, quotas=quotas)
    tokens, at_first = np.arange(4, dtype=np.int32), 0
    for n in range(100_000):
        if n == 20_000:
            at_first = rss()
        ns = pool.namespace(Identity(salt=b"%d" % n))
        with pool.match(tokens, ns) as hit:
            assert hit.num_tokens == 0
        blocks = pool.alloc(1, ns=ns)
        pool.seal(blocks)
        pool.insert(tokens, blocks, ns)
        pool.free(blocks)
    assert rss() - at_first < 4 << 20
    space = pool._space
    assert len(space.index.namespaces) < 3000
    if space.tenants is not None:
        assert len(space.tenants._of_ns) < 3000
        assert len(space.tenants._of_tenant) == len(pool.stats().tenants) < 3000
    found = [matched(pool, tokens.tolist(), pool.namespace(Identity(salt=b"%d" % n))) for n in range(99_980, 100_000)]
    assert found == [0] * 4 + [1] * 16
    pool.check()


def test_a_tenant_stays_while_it_has_blocks_though_nobody_has_its_namespace(make_pool: MakePool) -> None:
    pool = make_pool(16, quotas=Quotas(each=Quota(hbm=2 * BLOCK)))
    held = pool.alloc(2, ns=pool.namespace(A))
    for n in range(5000):
        pool.namespace(Identity(salt=b"%d" % n))
    with pytest.raises(QuotaExceeded):
        pool.alloc(1, ns=pool.namespace(A))
    pool.free(held)
    stale = int(pool.namespace(A))
    for n in range(5000):
        pool.free(pool.alloc(1, ns=pool.namespace(Identity(salt=b"b%d" % n))))
    with pytest.raises(ConfigError, match="was given up"):
        pool.alloc(1, ns=stale)
    pool.free(pool.alloc(2, ns=pool.namespace(A)))
    assert all(one.blocks == 0 for one in pool.stats().tenants.values())
