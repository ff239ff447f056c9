"""KV of requests that ended is found again by later ones, and gives way before any of them waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ref_decode import NEW, VOCAB, decode, drive, greedy, halted

from poolweave.crosspool_engine import DecodeEngine, DecodeRequest
from poolweave.errors import RequestRefused

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(600)]
PROMPT = np.random.default_rng(5).integers(0, VOCAB, 18).tolist()
BLOCK = 4


@pytest.mark.parametrize("name", ["mixtral", "glm"])
def test_a_second_turn_computes_only_what_is_new(
    engine: DecodeEngine, saved: dict[str, tuple[Any, str]], name: str
) -> None:
    model = saved[name][0]
    first = decode(engine, [DecodeRequest(request_id="1", model=name, tokens=PROMPT, max_new_tokens=NEW)])["1"]
    assert first.reused_tokens == 0
    assert first.tokens.tolist() == greedy(model, PROMPT)
    turn = [*PROMPT, *first.tokens.tolist(), 5, 6]
    again = [*PROMPT[:9], 3]
    got = decode(
        engine,
        [
            DecodeRequest(request_id="2", model=name, tokens=turn, max_new_tokens=NEW),
            DecodeRequest(request_id="3", model=name, tokens=again, max_new_tokens=NEW),
            DecodeRequest(request_id="4", model="llama", tokens=turn, max_new_tokens=NEW),
        ],
    )
    assert got["2"].reused_tokens == 28  # 29 were computed: the last token's KV never is
    assert got["2"].tokens.tolist() == greedy(model, turn)
    assert got["3"].reused_tokens in (0, 8)  # it may go where there is more room and no history
    assert got["3"].tokens.tolist() == greedy(model, again)
    assert got["4"].reused_tokens == 0  # another model's history is none of its
    assert engine.stats().history_blocks >= 29 // BLOCK


def test_kv_that_comes_along_goes_behind_what_is_known(engine: DecodeEngine, saved: dict[str, tuple[Any, str]]) -> None:
    request = DecodeRequest(request_id="1", model="qwen3", tokens=PROMPT, max_new_tokens=NEW, return_kv=True)
    first = decode(engine, [request])["1"]
    assert first.kv is not None
    turn = [*PROMPT, *first.tokens.tolist()]
    engine.drop_history()
    short = DecodeRequest(request_id="2", model="qwen3", tokens=PROMPT[:9], max_new_tokens=1)
    decode(engine, [short])
    whole = DecodeRequest(
        request_id="3", model="qwen3", tokens=turn, max_new_tokens=NEW, kv=first.kv[:7], num_computed=28, return_kv=True
    )
    got = decode(engine, [whole])["3"]
    assert got.reused_tokens == 8
    assert got.tokens.tolist() == greedy(saved["qwen3"][0], turn)
    assert got.kv is not None
    assert got.kv[:7].tobytes() == first.kv[:7].tobytes()


def test_kv_comes_back_from_the_first_block_that_is_not_known(engine: DecodeEngine) -> None:
    ask = {"model": "qwen3", "tokens": PROMPT, "max_new_tokens": NEW, "return_kv": True}
    requests = [DecodeRequest(request_id=str(n), known_blocks=n, **ask) for n in (0, 3, 99)]
    whole, rest, none = (decode(engine, [one])[one.request_id].kv for one in requests)
    assert whole is not None
    assert rest is not None
    assert none is not None
    assert len(rest) == len(whole) - 3
    assert rest[:-1].tobytes() == whole[3:-1].tobytes()  # the last one has room left, where anything may be
    assert len(none) == 0
    with pytest.raises(RequestRefused, match="known_blocks"):
        DecodeRequest(request_id="x", known_blocks=-1, **ask)


def test_history_gives_way_before_a_request_waits(engine: DecodeEngine) -> None:
    rng = np.random.default_rng(9)
    for n in range(12):
        tokens = rng.integers(0, VOCAB, 60).tolist()
        decode(engine, [DecodeRequest(request_id=f"h{n}", model="llama", tokens=tokens, max_new_tokens=1)])
    before = engine.stats().history_blocks
    assert before > 0
    for n in range(4):  # with two pages each, they need all there is
        engine.add(DecodeRequest(request_id=f"r{n}", model="llama", tokens=[n], max_new_tokens=120))
    with halted(*engine.worker_pids()[2:]):  # so that none is over, and history itself, when the first step returns
        engine.step(0.0)
        assert engine.stats().waiting == 0
        assert engine.stats().history_blocks < before
    drive(engine)
    for n in range(4):
        assert len(engine.result(f"r{n}").tokens) == 120


def test_requests_go_where_the_most_kv_is_free(engine: DecodeEngine) -> None:
    engine.set_control(lowered=False, in_flight=2)  # so that none is over when the first step returns
    for n in range(4):
        engine.add(DecodeRequest(request_id=f"r{n}", model="qwen3", tokens=[n], max_new_tokens=100))
    engine.step(0.0)
    used = [rank.used_blocks["qwen3"] for rank in engine.stats().kv]
    assert used == [50, 50]
    for n in range(4):
        engine.cancel(f"r{n}")
    drive(engine)
    assert all(engine.result(f"r{n}").finish_reason == "cancelled" for n in range(4))
