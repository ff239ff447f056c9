"""Control lowering off, several FFN ranks: their stages run at once, no rank's waits for another's."""

from __future__ import annotations

from typing import Any

import pytest
from ref_decode import NEW, drive, greedy, halted

from poolweave.crosspool_engine import DecodeEngine, DecodeRequest, FfnPlacement, Serving

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(600)]


def test_a_batch_goes_on_while_another_is_at_an_ffn_rank_that_does_not_answer(
    engine: DecodeEngine, saved: dict[str, tuple[Any, str]]
) -> None:
    engine.set_control(lowered=False, in_flight=2)
    for name, rank in (("llama", 0), ("glm", 1)):
        engine.deactivate(name)
        placement = FfnPlacement.by_layer([rank] * 3)
        engine.activate(name, Serving(path=saved[name][1], placement=placement, replicas=((0,),)))
    told: list[int] = []
    with halted(engine.worker_pids()[2]):
        for name in ("llama", "glm"):
            engine.add(DecodeRequest(request_id=name, model=name, tokens=[7], max_new_tokens=NEW))
        finished = False
        while not finished:
            for news in engine.step():
                assert news.request_id == "glm"
                finished |= news.finish_reason is not None
                told += [] if news.token is None else [news.token]
    assert told == greedy(saved["glm"][0], [7])
    drive(engine)
    assert engine.result("llama").tokens.tolist() == greedy(saved["llama"][0], [7])
    assert engine.result("glm").tokens.tolist() == told
    for name in ("llama", "glm"):
        engine.deactivate(name)
        engine.activate(name, Serving(path=saved[name][1]))
