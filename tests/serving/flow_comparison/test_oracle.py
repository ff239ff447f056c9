"""The oracle against figures worked out by hand; blocks of 4 tokens."""

from __future__ import annotations

import pytest

from poolweave.errors import ConfigError
from poolweave.serving.flow_comparison.oracle import Asked, Expected, predict


def asked(prompt: int | tuple[int, ...], answer: int, base: int = 0) -> Asked:
    tokens = tuple(range(base, base + prompt)) if isinstance(prompt, int) else prompt
    return Asked(prompt=tokens, answer=tuple(range(1000 + base, 1000 + base + answer)))


def follow(turn: Asked, delta: int, answer: int) -> Asked:
    prompt = turn.prompt + turn.answer + tuple(range(2000, 2000 + delta))
    return Asked(prompt=prompt, answer=tuple(range(3000, 3000 + answer)))


def figures(cached: int, there: int, back: int = 0) -> Expected:
    return Expected(cached_tokens=cached, blocks_to_decode=there, blocks_to_prefill=back)


FIRST = asked(10, 7)  # 10 prompt tokens: 2 whole blocks and a part; 16 computed at the end: 4 whole blocks
SECOND = follow(FIRST, 3, 5)  # 20 prompt tokens: 5 blocks, of which D's answer fills blocks 2 and 3; 24 computed


@pytest.mark.parametrize(
    ("flow", "first", "second"),
    [
        ("pd-basic", figures(0, 3), figures(0, 5)),
        ("pd-caching-1", figures(0, 3), figures(8, 5)),
        ("pd-caching-2", figures(0, 3), figures(8, 1)),
        ("pd-caching-3", figures(0, 3, 2), figures(16, 1, 1)),
        ("colocated", figures(0, 0), figures(16, 0)),
    ],
)
def test_two_turns_of_one_session(flow: str, first: Expected, second: Expected) -> None:
    assert predict(flow, [[FIRST], [SECOND]], 4) == [[first], [second]]


def test_a_prompt_that_is_all_known_leaves_one_token_to_compute() -> None:
    """8 tokens are 2 whole blocks: both are known, one may be reused; D lacks none."""
    twice = [[asked(8, 2)], [asked(8, 2)]]
    assert predict("pd-caching-1", twice, 4)[1] == [figures(4, 2)]
    assert predict("pd-caching-2", twice, 4)[1] == [figures(4, 0)]
    assert predict("pd-caching-3", twice, 4)[1] == [figures(4, 0, 0)]


def test_sessions_of_one_round_share_a_prefix_in_order() -> None:
    shared = tuple(range(9))
    round_ = [Asked(prompt=(*shared, 50, 51), answer=(1, 2)), Asked(prompt=(*shared, 60, 61), answer=(3, 4))]
    assert predict("pd-caching-2", [round_], 4) == [[figures(0, 3), figures(8, 1)]]
    assert predict("colocated", [round_], 4) == [[figures(0, 0), figures(8, 0)]]


def test_answers_of_a_round_are_not_known_to_its_other_requests() -> None:
    """The second prompt continues the first one's answer, but was sent before that was complete."""
    round_ = [FIRST, SECOND]
    assert predict("pd-caching-3", [round_], 4)[0][1].cached_tokens == 8


def test_an_answer_of_one_token_is_prefill_only() -> None:
    """D is not asked, so nothing is sent and D remembers nothing."""
    short = asked(10, 1)
    assert predict("pd-caching-3", [[short], [follow(short, 2, 2)]], 4) == [[figures(0, 0)], [figures(8, 4, 0)]]


def test_shorter_than_a_block_is_never_cached_but_is_sent() -> None:
    tiny = asked(3, 1 + 1)
    assert predict("pd-caching-3", [[tiny], [tiny]], 4) == [[figures(0, 1, 1)], [figures(0, 1, 0)]]


def test_an_unknown_flow_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="'pd-4' is not one of pd-basic, "):
        predict("pd-4", [], 4)
