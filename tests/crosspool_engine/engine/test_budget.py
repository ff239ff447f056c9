"""Bursts over the KV budget: they queue, in bounds and for a time, and nothing is ever corrupted."""

from __future__ import annotations

import pytest
from ref_decode import BUDGET, NEW, Clock, drive, mixed

from poolweave.crosspool_engine import DecodeEngine, DecodeRequest
from poolweave.errors import Overloaded

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(600)]


def test_a_burst_over_the_budget_queues_and_never_corrupts(
    engine: DecodeEngine, expected: dict[str, list[int]]
) -> None:
    """Room for a few requests at a time: the others wait their turn; KV never passes the budget."""
    burst = [
        DecodeRequest(request_id=f"{r.request_id}/{n}", model=r.model, tokens=r.tokens, max_new_tokens=100)
        for n in range(2)
        for r in mixed()
    ]
    for request in burst:
        engine.add(request)
    with pytest.raises(Overloaded, match="24 requests wait already"):
        engine.add(DecodeRequest(request_id="late", model="glm", tokens=[1]))
    peak, waited = 0, 0
    while engine.has_work:
        engine.step()
        peak, waited = max(peak, engine.stats().kv_bytes), max(waited, engine.stats().waiting)
    assert 0 < peak <= BUDGET
    assert waited > 0
    for request in burst:
        tokens = engine.result(request.request_id).tokens.tolist()
        assert len(tokens) == 100
        assert tokens[:NEW] == expected[request.request_id.split("/")[0]]
    engine.drop_history()
    for rank in engine.stats().kv:
        assert all(mapped <= 1 for mapped in rank.mapped_pages.values())  # demand is gone, within a page


def test_requests_that_wait_too_long_are_ended(engine: DecodeEngine, clock: Clock) -> None:
    for n in range(16):
        engine.add(DecodeRequest(request_id=f"big{n}", model="glm", tokens=[1], max_new_tokens=120))
    engine.step(0.0)
    waiting = engine.stats().waiting
    assert waiting > 0
    clock.now += 61.0
    told = [news for news in engine.step(0.0) if news.finish_reason == "error"]
    assert len(told) == waiting
    assert all(isinstance(news.error, Overloaded) for news in told)
    drive(engine)
    assert sum(engine.result(f"big{n}").finish_reason == "length" for n in range(16)) == 16 - waiting
