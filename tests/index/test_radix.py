"""RadixIndex as its users see it: inputs, ownership, caps, times, reasons, figures."""

from __future__ import annotations

import threading
from array import array
from typing import Any

import numpy as np
import pytest

from poolweave.errors import ConfigError
from poolweave.index import Identity, MissReason, RadixIndex

TOKENS = list(range(100, 164))  # four blocks of 16
BLOCKS = [11, 12, 13, 14]


def filled(**settings: Any) -> RadixIndex:
    index = RadixIndex(16, **settings)
    index.insert(TOKENS, BLOCKS)
    return index


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


FORMS = {
    "list": list,
    "tuple": tuple,
    "range-like": lambda t: range(t[0], t[-1] + 1),
    "array": lambda t: array("i", t),
    "int32": lambda t: np.array(t, np.int32),
    "int64": lambda t: np.array(t, np.int64),
    "uint32": lambda t: np.array(t, np.uint32),
    "big-endian": lambda t: np.array(t, ">i4"),
    "every other": lambda t: np.repeat(np.array(t, np.int32), 2)[::2],
    "read-only": lambda t: np.frombuffer(np.array(t, np.int32).tobytes(), np.int32),
    "numpy scalars": lambda t: [np.int64(x) for x in t],
}


@pytest.mark.parametrize("form", FORMS)
def test_c14_tokens_of_every_form_are_the_same_prompt(form: str) -> None:
    tokens = FORMS[form](TOKENS)
    assert filled().match(tokens).blocks.tolist() == BLOCKS
    index = RadixIndex()
    index.insert(tokens, np.array(BLOCKS, np.uint64))
    assert index.match(TOKENS).blocks.tolist() == BLOCKS
    assert index.match_many([tokens, TOKENS])[0].blocks.tolist() == BLOCKS
    assert index.delete(tokens).tolist() == BLOCKS[::-1]


@pytest.mark.engine
def test_c14_torch_tokens_are_the_same_prompt() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.int32, torch.int64):
        assert filled().match(torch.tensor(TOKENS, dtype=dtype)).blocks.tolist() == BLOCKS


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([True] * 16, TypeError),
        ([1.0] * 16, TypeError),
        (np.ones(16, bool), TypeError),
        (np.ones(16, np.float32), TypeError),
        (["a"] * 16, TypeError),
        ([-1] * 16, ValueError),
        (np.full(16, -1, np.int32), ValueError),
        (np.full(16, -1, np.int64), ValueError),
        ([2**31] * 16, ValueError),
        (np.ones((2, 16), np.int32), ValueError),
        (np.ones((2, 16), np.int64), ValueError),
    ],
)
def test_c14_what_is_no_token_is_refused(tokens: Any, error: type[Exception]) -> None:
    index = filled()
    for call in (index.match, lambda t: index.insert(t, [1]), index.delete, lambda t: index.match_many([t])):
        with pytest.raises(error):
            call(tokens)
    index.check()
    assert len(index) == 4


def test_blocks_are_checked_too() -> None:
    index = RadixIndex()
    for blocks, error in (([1.5], TypeError), ([-1], ValueError), ([1, 2], ConfigError), ([], ConfigError)):
        with pytest.raises(error):
            index.insert(TOKENS[:16], blocks)
    with pytest.raises(ConfigError, match=r"17 tokens are 1 whole blocks, got 2 payloads"):
        index.insert(TOKENS[:17], [1, 2])
    index.insert(TOKENS[:16], [2**64 - 1])
    assert index.match(TOKENS).blocks.tolist() == [2**64 - 1]
    with pytest.raises(ValueError, match="negative"):
        index.evict(-1)


@pytest.mark.parametrize("tokens", [[], [5], list(range(15))])
def test_less_than_a_block_is_nothing(tokens: list[int]) -> None:
    index = filled()
    assert index.insert(tokens, []).num_tokens == 0
    found = index.match(tokens, pin=True)
    assert (found.num_tokens, found.blocks.tolist(), found.miss_reason) == (0, [], MissReason.NONE)
    assert not found.pinned
    assert index.delete(tokens).tolist() == index.evict(0).tolist() == index.coldest(0).tolist() == []
    assert index.match_many([]) == []


@pytest.mark.parametrize("settings", [{"max_bytes": 100}, {"max_bytes": "1 KiB"}, {"ttl_s": 0}, {"ttl_s": -1.0}])
def test_impossible_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RadixIndex(**settings)


def test_block_tokens_is_a_power_of_two() -> None:
    for size in (0, 3, 12, 2**21):
        with pytest.raises(ConfigError):
            RadixIndex(size)
    for size in (1, 8, 256):
        index = RadixIndex(size)
        index.insert(list(range(size * 3 - 1)), [1, 2])
        assert index.match(list(range(size * 2))).blocks.tolist() == [1, 2]
        assert index.block_tokens == size


def test_a_longer_partial_block_is_never_indexed() -> None:
    index = RadixIndex()
    index.insert(TOKENS[:40], [1, 2])
    assert index.match(TOKENS).num_tokens == 32


def test_duplicates_stay_the_callers() -> None:
    index = filled()
    result = index.insert(TOKENS[:32] + [1] * 16, [11, 92, 93])
    assert result.duplicates.tolist() == [11, 92]  # not taken
    assert result.surplus.tolist() == [92]  # a second copy: free it
    assert (result.num_tokens, result.num_new, result.evicted.tolist()) == (48, 1, [])


def test_results_outlive_the_index_and_are_read_only() -> None:
    found = filled().match(TOKENS)
    blocks = found.blocks
    del found
    assert blocks.tolist() == BLOCKS
    with pytest.raises(ValueError, match="read-only"):
        blocks[0] = 1


def test_a_pin_ends_with_its_block() -> None:
    index = filled()
    with index.match(TOKENS[:32], pin=True) as hit:
        assert hit.pinned
        assert index.evict(10).tolist() == [14, 13]
    assert index.evict(10).tolist() == [12, 11]
    held = filled()
    found = held.match(TOKENS, pin=True)
    del found  # collected: given back
    assert len(held.evict(10)) == 4


def test_a_pin_outlives_the_name_of_its_index() -> None:
    index = filled()
    found = index.match(TOKENS, pin=True)
    del index
    assert found.blocks.tolist() == BLOCKS
    found.close()


def test_time_to_live_with_a_fake_clock() -> None:
    clock = FakeClock()
    index = filled(ttl_s=60, clock=clock)
    clock.now_s += 59
    assert index.match(TOKENS, touch=False).num_tokens == 64
    clock.now_s += 1
    late = index.match(TOKENS)
    assert (late.num_tokens, late.miss_reason) == (0, MissReason.EXPIRED)
    assert sorted(index.expire()) == BLOCKS
    assert index.stats().gone[MissReason.EXPIRED] == 4


def test_a_use_begins_the_time_to_live_anew_at_once() -> None:
    clock = FakeClock()
    index = filled(ttl_s=60, clock=clock)
    clock.now_s += 50
    assert index.match(TOKENS).num_tokens == 64  # nobody wrote since: the use stands in the lists later only
    clock.now_s += 50
    assert index.match(TOKENS).num_tokens == 64
    assert index.expire().tolist() == []


def test_uses_by_other_threads_count_for_the_order() -> None:
    index = RadixIndex()
    for prompt in range(40):
        index.insert([prompt] * 16, [prompt])

    def use(first: int) -> None:
        for prompt in range(first, first + 10):
            index.match([prompt] * 16)

    for first in (0, 10):  # one after the other: the last few uses of each are still to be put in order
        thread = threading.Thread(target=use, args=(first,))
        thread.start()
        thread.join()
    assert sorted(index.evict(20).tolist()) == list(range(20, 40))
    assert sorted(index.evict(20).tolist()) == list(range(20))


def test_an_index_that_expires_at_insert_gives_the_old_blocks_back() -> None:
    clock = FakeClock()
    index = filled(ttl_s=60, clock=clock)
    clock.now_s += 61
    assert sorted(index.insert([1] * 16, [99]).evicted) == BLOCKS


def test_priorities() -> None:
    index = RadixIndex()
    index.insert([1] * 16, [1], priority=1)
    index.insert([2] * 16, [2])
    index.match([2] * 16)
    assert index.evict(2).tolist() == [2, 1]


def test_c16_burst_of_unique_prompts_stays_under_the_cap() -> None:
    cap = 8 << 20
    index = RadixIndex(max_bytes="8 MiB")
    prompts = np.random.default_rng(1).integers(0, 128_000, (50_000, 1024), dtype=np.int32)
    blocks = np.arange(64, dtype=np.uint64)
    held = 0
    for i, prompt in enumerate(prompts):
        result = index.insert(prompt, blocks)
        held += result.num_new - len(result.evicted)
        assert index.stats().nbytes <= cap
        if i % 500 == 0:
            assert index.match(prompt).num_tokens == 1024
            assert len(index) == held
    index.check()
    assert index.match(prompts[0]).miss_reason in (MissReason.EVICTED, MissReason.NEVER_STORED)  # long ago
    lately = [index.match(prompt).miss_reason for prompt in prompts[-2000:-1900]]  # newer ones have taken some places
    assert lately.count(MissReason.EVICTED) > 50
    assert held * (64 + 8) > cap * 0.8  # the cap is used, too


def test_a_tenant_over_its_cap_leaves_others_alone() -> None:
    index = RadixIndex(max_tenant_bytes="64 KiB")
    greedy = [index.namespace(Identity(model=m, salt=b"A")) for m in ("x", "y")]
    modest = index.namespace(Identity(model="x", salt=b"B"))
    index.insert(TOKENS, BLOCKS, modest)
    for i in range(500):
        index.insert([i] * 160, range(10), greedy[i % 2])
        index.check()  # a tenant above its cap fails it
    assert index.match(TOKENS, modest).num_tokens == 64
    assert index.tenant_bytes(greedy[0]) == index.tenant_bytes(greedy[1]) > 48 << 10
    assert index.stats().gone[MissReason.EVICTED] > 0


def test_c17_hit_rate_of_half() -> None:
    index = RadixIndex()
    for i in range(500):
        index.insert([i] * 64, BLOCKS)
    for i in range(1000):
        index.match([i] * 64)
    assert 0.49 <= index.stats().hit_rate <= 0.51
    assert index.stats().misses[MissReason.NEVER_STORED] == 500


def test_c18_a_store_of_ten_blocks_and_thirty_insertions() -> None:
    index = RadixIndex()
    stored: set[int] = set()
    for i in range(30):
        if len(stored) == 10:
            stored -= set(index.evict(1).tolist())
        index.insert([i] * 16, [i])
        stored.add(i)
        assert len(index) == len(stored)
    for i in range(30):
        found = index.match([i] * 16)
        assert found.blocks.tolist() == ([i] if i in stored else [])
        assert (found.miss_reason is MissReason.NONE) == (i in stored)
    missed = index.stats().misses
    assert missed[MissReason.EVICTED] + missed[MissReason.NEVER_STORED] == 20
    assert missed[MissReason.EVICTED] >= 18  # of two that fall on one place of its memory the older is forgotten


def test_c19_why_did_this_miss() -> None:
    index = RadixIndex()
    mine, theirs = index.namespace(Identity(salt=b"mine")), index.namespace(Identity(salt=b"theirs"))
    assert index.match(TOKENS, mine).miss_reason is MissReason.NEVER_STORED
    index.insert(TOKENS, BLOCKS, theirs)
    assert index.match(TOKENS, mine).miss_reason is MissReason.OTHER_IDENTITY
    index.mark(TOKENS, MissReason.IN_FLIGHT, mine)
    assert index.match(TOKENS, mine).miss_reason is MissReason.IN_FLIGHT
    index.mark(TOKENS, MissReason.TIMEOUT, mine)
    assert index.match(TOKENS, mine).miss_reason is MissReason.TIMEOUT
    index.insert(TOKENS, BLOCKS, mine)
    assert index.match(TOKENS, mine).miss_reason is MissReason.NONE
    index.clear(mine, reason=MissReason.INSTANCE_GONE)
    assert index.match(TOKENS, mine).miss_reason is MissReason.INSTANCE_GONE
    index.delete(TOKENS, theirs)
    assert index.match(TOKENS, theirs).miss_reason is MissReason.DELETED


def test_threads_match_while_one_writes() -> None:
    index = RadixIndex(max_bytes="1 MiB")
    prompts = [np.full(16 * 8, i, np.int32) for i in range(2000)]
    faults: list[str] = []
    done = threading.Event()

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not done.is_set():
            for i in rng.integers(0, len(prompts), 64).tolist():
                found = index.match(prompts[i])
                if found.blocks.tolist() != [i * 8 + j for j in range(found.num_tokens // 16)]:
                    faults.append(f"prompt {i}: {found.blocks.tolist()}")

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
    for reader in readers:
        reader.start()
    for i, prompt in enumerate(prompts * 3):
        first = i % len(prompts) * 8
        index.insert(prompt, np.arange(first, first + 8, dtype=np.uint64))
        if i % 50 == 0:
            index.evict(20)
    done.set()
    for reader in readers:
        reader.join()
    assert not faults
    index.check()


def test_a_namespace_that_was_not_given_out_is_refused() -> None:
    """It may become another identity's, and its prompts would match there."""
    index = RadixIndex()
    for call in (
        lambda: index.insert([1] * 16, [1], 2),
        lambda: index.match([1] * 16, 2),
        lambda: index.match_many([[1] * 16], 2),
        lambda: index.delete([1] * 16, -1),
    ):
        with pytest.raises(ConfigError, match="namespace") as caught:
            call()
        assert caught.value.setting == "ns"
    assert index.insert([1] * 16, [1], index.namespace(Identity(model="m"))).num_tokens == 16
