"""Who runs next: decode first, arrival order, the token budget, and whose blocks are taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from poolweave.errors import OutOfBlocks, QuotaExceeded
from poolweave.index import Identity
from poolweave.mempool import MemPool, PoolConfig, Quota, Quotas
from poolweave.serving.engine import EngineConfig, SamplingParams, Sequence
from poolweave.serving.engine.batcher import Batcher, Plan
from poolweave.transfer import KVLayout
from poolweave.types import Tier

LAYOUT = KVLayout(num_layers=1, kv_heads=1, head_dim=32, dtype="float32")  # 4 KiB a block
NUM_BLOCKS = 8


@pytest.fixture
def pool() -> Iterator[MemPool]:
    size = NUM_BLOCKS * LAYOUT.block_bytes
    with MemPool(LAYOUT, hbm=size, dram=size, config=PoolConfig(page_bytes=4096)) as pool:
        yield pool
        pool.check()


def batcher(pool: MemPool, step_tokens: int = 64, max_sequences: int = 4) -> Batcher:
    return Batcher(pool, EngineConfig(step_tokens=step_tokens, max_sequences=max_sequences))


def request(name: str, length: int, **settings: Any) -> Sequence:
    return Sequence(name, [1] * length, SamplingParams(), **settings)


def chunks(plan: Plan) -> dict[str, int]:
    return {name: chunk.num_tokens for name, chunk in plan.chunks.items()}


def computed(plan: Plan) -> None:
    """As if the plan had run: whoever is complete gets a token."""
    for chunk in plan.chunks.values():
        chunk.sequence.num_computed += chunk.num_tokens
        if chunk.sequence.num_pending == 0:
            chunk.sequence.tokens.append(1)


def steps(subject: Batcher, num: int) -> list[dict[str, int]]:
    seen = []
    for _ in range(num):
        plan = subject.plan()
        subject.check()
        seen.append(chunks(plan))
        computed(plan)
    return seen


def test_a_prompt_is_cut_by_the_budget_and_others_use_what_is_left(pool: MemPool) -> None:
    subject = batcher(pool, step_tokens=20)
    for sequence in (request("a", 50), request("b", 15)):
        subject.add(sequence)
    assert steps(subject, 5) == [{"a": 20}, {"a": 20}, {"a": 10, "b": 10}, {"a": 1, "b": 5}, {"a": 1, "b": 1}]


def test_decode_comes_before_prefill_whoever_arrived_first(pool: MemPool) -> None:
    subject = batcher(pool, step_tokens=20)
    subject.add(request("short", 3))
    steps(subject, 1)
    subject.add(request("long", 60))
    assert [list(step.items()) for step in steps(subject, 2)] == [[("short", 1), ("long", 19)]] * 2


def test_at_most_max_sequences_run_and_the_rest_wait_in_order(pool: MemPool) -> None:
    subject = batcher(pool, max_sequences=2)
    sequences = [request(name, 4) for name in "abc"]
    for sequence in sequences:
        subject.add(sequence)
    assert [list(step) for step in steps(subject, 2)] == [["a", "b"], ["a", "b"]]
    subject.remove(sequences[0])
    assert [list(step) for step in steps(subject, 1)] == [["b", "c"]]


def test_a_big_request_is_not_overtaken(pool: MemPool) -> None:
    subject = batcher(pool)
    held = pool.alloc(5)
    subject.add(request("big", 60))
    subject.add(request("small", 4))
    assert steps(subject, 1) == [{}]
    pool.free(held)
    assert steps(subject, 1) == [{"big": 60, "small": 4}]


def test_growth_takes_the_youngest_ones_blocks_and_its_place_in_the_step(pool: MemPool) -> None:
    subject = batcher(pool, step_tokens=200)
    old, mid, young = request("old", 48), request("mid", 32), request("young", 47)
    for sequence in (old, mid, young):
        subject.add(sequence)
    assert len(steps(subject, 1)[0]) == 3  # 3 + 2 + 3 blocks: full, and `old` needs a fourth now
    plan = subject.plan()
    assert chunks(plan) == {"old": 1, "mid": 1}
    assert (young.num_computed, len(young.blocks), young.num_preemptions) == (0, 0, 1)
    assert [s.request_id for s in subject.waiting] == ["young"]
    assert len(young.tokens) == 48  # its answer so far is kept


def test_waiting_ones_give_up_a_matched_prefix_before_running_ones_stop(pool: MemPool) -> None:
    subject = batcher(pool, step_tokens=200, max_sequences=2)
    old, mid = request("old", 48), request("mid", 32)
    waiting = request("waiting", 47, blocks=pool.alloc(3), num_computed=32)
    for sequence in (old, mid, waiting):
        subject.add(sequence)
    steps(subject, 1)
    assert chunks(subject.plan()) == {"old": 1, "mid": 1}
    assert (waiting.num_computed, len(waiting.blocks), mid.num_preemptions) == (0, 0, 0)


def test_the_youngest_waits_instead_of_taking_from_the_old(pool: MemPool) -> None:
    subject = batcher(pool, step_tokens=200)
    old, young = request("old", 70), request("young", 48)
    subject.add(old)
    subject.add(young)
    assert steps(subject, 3) == [{"old": 70, "young": 48}, {"old": 1}, {"old": 1}]  # 5 + 3 blocks: full
    assert (old.num_preemptions, young.num_preemptions, len(young.blocks)) == (0, 0, 3)


def test_only_a_sequence_larger_than_the_pool_fails(pool: MemPool) -> None:
    subject = batcher(pool, step_tokens=200)
    big, small = request("big", NUM_BLOCKS * 16), request("small", 16)
    subject.add(big)
    steps(subject, 1)
    subject.add(small)
    plan = subject.plan()
    [(failed, error)] = plan.failed
    assert failed is big
    assert isinstance(error, OutOfBlocks)
    assert chunks(plan) == {}
    subject.remove(big)
    pool.free(big.blocks)
    assert chunks(subject.plan()) == {"small": 16}


def test_a_prefix_in_dram_is_brought_in_before_it_is_used(pool: MemPool) -> None:
    prefix = pool.alloc(2, tier=Tier.DRAM)
    sequence = request("r", 40, blocks=prefix, num_computed=32)
    subject = batcher(pool)
    subject.add(sequence)
    assert chunks(subject.plan()) == {"r": 8}
    assert len(pool.slots(sequence.blocks)) == 3
    assert sequence.blocks[:2] == prefix


def test_a_prefix_in_dram_waits_while_hbm_is_full(pool: MemPool) -> None:
    held = pool.alloc(NUM_BLOCKS - 1)
    sequence = request("r", 40, blocks=pool.alloc(2, tier=Tier.DRAM), num_computed=32)
    subject = batcher(pool)
    subject.add(sequence)
    assert chunks(subject.plan()) == {}
    assert (sequence.num_computed, len(sequence.blocks)) == (32, 2)
    pool.free(held)
    assert chunks(subject.plan()) == {"r": 8}


@pytest.fixture
def shared(pool: MemPool) -> Iterator[MemPool]:
    """Each tenant may take half of it."""
    size = NUM_BLOCKS * LAYOUT.block_bytes
    quotas = Quotas(each=Quota(hbm=size // 2))
    with MemPool(LAYOUT, hbm=size, config=PoolConfig(page_bytes=4096, quotas=quotas)) as shared:
        yield shared
        shared.check()


def tenants(pool: MemPool, *salts: bytes) -> list[int]:
    return [pool.namespace(Identity(model="m", salt=salt)) for salt in salts]


def test_a_tenant_at_its_quota_waits_and_lets_others_pass(shared: MemPool) -> None:
    mine, others = tenants(shared, b"mine", b"others")
    subject = batcher(shared, step_tokens=1000)
    first, second, other = (
        request("first", 48, ns=mine), request("second", 48, ns=mine), request("other", 48, ns=others)
    )  # fmt: skip
    for sequence in (first, second, other):
        subject.add(sequence)
    assert chunks(subject.plan()) == {"first": 48, "other": 48}
    assert subject.waiting == [second]
    assert subject.num_preempted == 0
    shared.free(first.blocks)
    subject.remove(first)
    other.num_computed = 48
    other.tokens.append(1)
    assert chunks(subject.plan()) == {"other": 1, "second": 48}
    shared.free(second.blocks)
    shared.free(other.blocks)


def test_a_tenant_that_grows_past_its_quota_takes_blocks_of_its_own_youngest_only(shared: MemPool) -> None:
    mine, others = tenants(shared, b"mine", b"others")
    subject = batcher(shared, step_tokens=1000)
    old, other, young = request("old", 32, ns=mine), request("other", 32, ns=others), request("young", 32, ns=mine)
    for sequence in (old, young, other):
        subject.add(sequence)
    plan = subject.plan()
    assert set(plan.chunks) == {"old", "other", "young"}
    computed(plan)
    assert set(subject.plan().chunks) >= {"old", "other"}  # each is a block longer now; only its own tenant gives way
    assert (young.num_preemptions, other.num_preemptions, old.num_preemptions) == (1, 0, 0)
    for sequence in (old, other, young):
        shared.free(sequence.blocks)


def test_a_tenants_salts_wait_for_each_other_and_give_way_to_each_other(shared: MemPool) -> None:
    one, two = (shared.namespace(Identity(model="m", salt=salt, tenant=b"key")) for salt in (b"1", b"2"))
    [others] = tenants(shared, b"others")
    subject = batcher(shared, step_tokens=1000)
    old, young, other = request("old", 32, ns=one), request("young", 32, ns=two), request("other", 32, ns=others)
    for sequence in (old, young, other):
        subject.add(sequence)
    plan = subject.plan()
    assert set(plan.chunks) == {"old", "young", "other"}
    computed(plan)
    subject.plan()
    assert (young.num_preemptions, other.num_preemptions, old.num_preemptions) == (1, 0, 0)
    for sequence in (old, young, other):
        shared.free(sequence.blocks)


def test_a_sequence_larger_than_its_tenants_quota_fails_alone(shared: MemPool) -> None:
    [mine] = tenants(shared, b"mine")
    subject = batcher(shared, step_tokens=1000)
    large = request("large", 16 * 5, ns=mine)
    subject.add(large)
    [(failed, error)] = subject.plan().failed
    assert failed is large
    assert isinstance(error, QuotaExceeded)
    assert error.limit == NUM_BLOCKS // 2
