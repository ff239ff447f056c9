"""A trace asked of a door: prefixes as recorded, sessions in order, everything counted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")

from ref_door import World
from ref_words import save_words

from poolweave.errors import ConfigError
from poolweave.serving.replay import ReplayConfig, check_server, prompt_of, replay
from poolweave.serving.simulator.traces import SharedPrefixes, TokenSource, in_order
from poolweave.types import Role

LIMITS = ReplayConfig(model="echo", vocabulary=200, max_prompt_tokens=600, max_answer_tokens=8)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(save_words(tmp_path_factory.mktemp("models") / "echo"), (Role.COLOCATED,))
    yield made
    made.close()


def test_prompts_share_what_was_shared_and_nothing_else() -> None:
    source = TokenSource(16)
    shared, own, other = source.tokens("shared", 64), source.tokens("own", 40), source.tokens("other", 40)
    first = source.request(0, [shared, own], source.tokens("a", 4))
    second = source.request(1, [shared, other], source.tokens("b", 4))
    prompts = [prompt_of(request, 16, LIMITS) for request in (first, second, first)]
    assert [len(prompt) for prompt in prompts] == [104] * 3
    assert prompts[0] == prompts[2]
    assert prompts[0][:64] == prompts[1][:64]
    assert prompts[0][64:80] != prompts[1][64:80]
    assert all(100 <= token < 200 for prompt in prompts for token in prompt)


def test_sessions_keep_their_order_and_figures_are_counted(world: World) -> None:
    source = TokenSource(16)
    history = source.tokens("start", 48)
    requests = []
    for turn in range(4):  # all at once: each must wait for the one before it
        requests.append(source.request(0.001 * turn, [history], source.tokens(f"answer {turn}", 6), session="s"))
        history = source.tokens("start", 48 + 32 * (turn + 1))
    trace = in_order("talk", 16, requests)
    told: list[int] = []
    report = asyncio.run(replay(trace, _at(world), lambda: told.append(1)))
    assert report.complete
    assert len(told) == 4
    sent = next(iter(world.instances.values())).instance._seen[-4:]
    assert [len(prompt) for _, prompt in sent] == [48, 80, 112, 144]
    summary = report.summary()
    assert (summary["requests"], summary["statuses"]) == (4, {"200": 4})
    assert report.answer_tokens == 24
    assert report.prompt_tokens == 48 + 80 + 112 + 144
    assert summary["hit_ratio"] > 0
    assert {"ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "jct_p99_s"} <= summary.keys()


def test_what_is_refused_is_told_by_its_status(world: World) -> None:
    trace = SharedPrefixes(share=0.5, num_requests=3).trace().at_rate(1000.0)
    report = asyncio.run(replay(trace, _at(world, model="other")))
    assert not report.complete
    assert report.summary()["statuses"] == {"404": 3}
    lost = asyncio.run(replay(trace.head(1), ReplayConfig(model="echo", url="http://127.0.0.1:1")))
    assert lost.summary()["statuses"] == {"lost": 1}


def test_a_server_is_asked_for_the_model_first(world: World) -> None:
    check_server(_at(world))
    with pytest.raises(ConfigError, match="has no model 'other', but echo"):
        check_server(_at(world, model="other"))


@pytest.mark.parametrize("wrong", [{"speed": 0}, {"vocabulary": 50}, {"max_answer_tokens": -1}])
def test_limits_that_cannot_be_are_config_errors(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ReplayConfig(model="m", **wrong)  # type: ignore[arg-type]


def _at(world: World, model: str = "echo") -> ReplayConfig:
    return ReplayConfig(model=model, url=world.door.address, vocabulary=200, max_answer_tokens=8)
