from __future__ import annotations

import array
import math

import numpy as np
import pytest

from poolweave.errors import ConfigError
from poolweave.index import Identity
from poolweave.scheduler.prompt_tree import PromptTree, Source
from poolweave.scheduler.slots import Slots


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 32_000, length, dtype=np.int32)


def test_whole_blocks_of_each_instance() -> None:
    tree = PromptTree(block_tokens=16)
    tokens = prompt(100)
    assert tree.insert(tokens, "prefill-0") == 96
    assert tree.insert(tokens[:40], "prefill-1") == 32
    assert tree.match(tokens) == {"prefill-0": 96, "prefill-1": 32}
    assert tree.match(tokens[:50]) == {"prefill-0": 48, "prefill-1": 32}
    assert tree.match(np.concatenate([tokens, tokens])) == {"prefill-0": 96, "prefill-1": 32}
    assert tree.match(prompt(100, seed=1)) == {}
    assert (tree.entries("prefill-0"), tree.entries("prefill-1"), tree.entries("nobody")) == (6, 2, 0)
    assert (tree.stats().blocks, tree.stats().entries) == (6, 8)
    tree.check()


@pytest.mark.parametrize("length", [0, 1, 15])
def test_less_than_a_block_is_nothing(length: int) -> None:
    tree = PromptTree()
    assert tree.insert(prompt(length), "a") == 0
    assert tree.match(prompt(length)) == {}
    assert tree.remove(prompt(length), "a") == 0
    assert tree.stats().nodes == 0


def test_tokens_of_every_kind_are_the_same_prompt() -> None:
    tree = PromptTree()
    tokens = prompt(64)
    tree.insert(tokens.tolist(), "a")
    same = [
        tuple(tokens.tolist()),
        tokens.astype(np.int64),
        tokens.astype(np.uint32),
        array.array("l", tokens.tolist()),
    ]
    for spelling in (*same, [np.int64(t) for t in tokens]):
        assert tree.match(spelling) == {"a": 64}
    for wrong, error in (([1.0] * 16, TypeError), ([True] * 16, TypeError), ([-1] * 16, ValueError)):
        with pytest.raises(error):
            tree.match(wrong)


def test_another_identity_is_another_prompt() -> None:
    tree = PromptTree()
    ours, theirs = Identity(model="m", salt=b"ours"), Identity(model="m", salt=b"theirs")
    ns = tree.namespace(ours)
    tokens = prompt(64)
    tree.insert(tokens, "a", ns)
    assert tree.match(tokens, ns) == {"a": 64}
    assert tree.match(tokens) == {}
    assert tree.match(tokens, tree.namespace(theirs)) == {}
    assert tree.namespace_of(ours.digest) == ns
    other = PromptTree()  # in another process, interned in another order: the same keys
    other.namespace(theirs)
    assert other.keys(tokens, other.namespace(ours)).tolist() == tree.keys(tokens, ns).tolist()


def test_entries_are_believed_for_the_time_of_their_source() -> None:
    clock = Clock()
    tree = PromptTree(ttl_s={Source.ROUTE: 5, Source.RESPONSE: 10, Source.EVENT: 100}, clock=clock)
    tokens = prompt(64)
    tree.insert(tokens, "told")
    tree.insert(tokens, "said", source=Source.EVENT)
    clock.now += 9
    tree.insert(tokens[:32], "told")  # refreshes the first half only
    assert tree.match(tokens) == {"told": 64, "said": 64}
    clock.now += 1
    assert tree.match(tokens) == {"told": 32, "said": 64}
    tree.insert(tokens, "said")  # a response does not shorten what the instance said itself
    clock.now += 89
    assert tree.match(tokens) == {"said": 64}
    clock.now += 1
    assert tree.match(tokens) == {}
    tree.sweep()
    assert (tree.stats().entries, tree.stats().nodes) == (0, 0)
    assert tree.stats().expired == 8


def test_event_can_be_believed_for_ever() -> None:
    clock = Clock()
    tree = PromptTree(ttl_s={Source.ROUTE: 5, Source.RESPONSE: 10, Source.EVENT: math.inf}, clock=clock)
    tree.insert(prompt(32), "a", source=Source.EVENT)
    clock.now += 1e12
    assert tree.match(prompt(32)) == {"a": 32}


def test_blocks_told_by_key_and_taken_back() -> None:
    tree = PromptTree()
    tokens = prompt(96)
    keys = tree.keys(tokens)
    assert tree.insert_keys(keys[:2], "a") == 2
    assert tree.insert_keys(keys[2:5], "a", parent=int(keys[1])) == 3
    assert tree.match(tokens) == {"a": 80}
    assert tree.insert_keys(keys[5:], "b", parent=int(keys[4])) == 0  # b does not hold what comes before
    assert tree.stats().orphans == 1
    assert tree.remove_keys(keys[3:4], "a") == 2  # with what continues it
    assert tree.match(tokens) == {"a": 48}
    assert tree.remove_keys(keys[4:], "a") == 0
    assert tree.remove_keys(keys, "nobody") == 0
    assert tree.remove(tokens, "a", keep_tokens=17) == 1
    assert tree.match(tokens) == {"a": 32}
    assert tree.remove(tokens, "a") == 2
    assert (tree.stats().entries, tree.stats().nodes) == (0, 0)


def test_dead_instance_is_forgotten_in_one_call() -> None:
    tree = PromptTree()
    shared = prompt(64)
    for seed in range(50):
        tree.insert(np.concatenate([shared, prompt(64, seed + 1)]), "dead")
    tree.insert(shared, "alive")
    tree.drop("dead")
    assert tree.match(shared) == {"alive": 64}
    assert tree.stats().entries == 4
    assert "dead" not in tree.slots
    tree.insert(prompt(64, seed=1), "newborn")  # takes the dead one's slot, and none of its entries
    assert tree.slots.slot("newborn") == 0
    assert tree.match(np.concatenate([shared, prompt(64, seed=1)])) == {"alive": 64}
    tree.sweep()
    assert tree.stats().blocks == 8
    tree.check()
    tree.drop("never seen")


def test_memory_of_the_dead_comes_back_while_others_insert() -> None:
    tree = PromptTree()
    for seed in range(200):
        tree.insert(prompt(64, seed), "dead")
    tree.drop("dead")
    for seed in range(1000, 1200):
        tree.insert(prompt(64, seed), "alive")
    assert tree.stats().nodes <= 200
    assert tree.stats().blocks <= 800


def test_burst_of_unique_prompts_stays_under_the_cap() -> None:  # C16
    tree = PromptTree(max_bytes=1 << 20)
    last: list[np.ndarray] = []
    for seed in range(3_000):
        tokens = prompt(1024, seed)
        tree.insert(tokens, f"prefill-{seed % 8}")
        last = [*last[-4:], tokens]
        assert tree.stats().nbytes <= 1 << 20
    for back, tokens in enumerate(reversed(last)):
        assert tree.match(tokens) == {f"prefill-{(2_999 - back) % 8}": 1024}
    tree.check()


def test_trees_share_slots() -> None:
    slots = Slots()
    prefill, decode = PromptTree(slots=slots), PromptTree(slots=slots)
    prefill.insert(prompt(32), "a")
    decode.insert(prompt(32), "b")
    assert prefill.match(prompt(32)) == {"a": 32}
    assert decode.match(prompt(32)) == {"b": 32}
    assert decode.scores(decode.keys(prompt(32))).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"block_tokens": 0}, "block_tokens"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": math.nan}, "ttl_s"),
        ({"ttl_s": {Source.EVENT: 5}}, "ttl_s"),
        ({"max_bytes": 1000}, "max_bytes"),
    ],
)
def test_settings_out_of_range(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as error:
        PromptTree(**settings)  # type: ignore[arg-type]
    assert error.value.setting == named


def test_ten_thousand_salts_leave_nothing_behind() -> None:
    """A salt a request must not be kept for ever: a namespace is computed, not remembered."""
    tree = PromptTree(block_tokens=16)
    given = {tree.namespace(Identity(model="m", salt=str(number).encode())) for number in range(10_000)}
    assert len(given) == 10_000
    assert 0 not in given
    assert not any(isinstance(value, (dict, list, set)) and len(value) > 10 for value in vars(tree).values())
