"""Requests through an engine: how they end, what is refused, and what memory pressure does to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from poolweave.errors import (
    ConfigError,
    InstanceClosed,
    LayoutMismatch,
    NotFinite,
    OutOfBlocks,
    RequestRefused,
    StaleHandle,
    UnknownBlock,
)
from poolweave.serving.engine import EngineConfig, SamplingParams, Sequence, TorchEngine, load_model
from poolweave.types import Tier

pytestmark = pytest.mark.engine

PROMPT = tuple(range(3, 43))


@pytest.fixture
def model(loaded: Any) -> Any:
    return loaded("llama")


def request(name: str = "r", tokens: tuple[int, ...] = PROMPT, **settings: Any) -> Sequence:
    kept = {key: settings.pop(key) for key in ("num_computed", "blocks", "forced", "num_prompt") if key in settings}
    return Sequence(name, list(tokens), SamplingParams(**{"max_new_tokens": 8, **settings}), **kept)


def test_an_answer_ends_at_its_length(model: Any, make_pool: Any, run: Any, greedy: Any) -> None:
    engine = TorchEngine(model, make_pool(model))
    sequence = request()
    assert run(engine, sequence) == [greedy("llama", PROMPT, 8)]
    assert sequence.finish_reason == "length"
    assert sequence.num_computed == len(PROMPT) + 7  # the last token was never an input
    assert len(sequence.blocks) == 3


def test_stop_tokens_end_an_answer_and_belong_to_it(model: Any, make_pool: Any, run: Any, greedy: Any) -> None:
    whole = greedy("llama", PROMPT, 8)
    stop = whole[3]
    sequence = request(stop_token_ids=[stop])
    assert run(TorchEngine(model, make_pool(model)), sequence) == [whole[: whole.index(stop) + 1]]
    assert sequence.finish_reason == "stop"


def test_eos_ends_an_answer_unless_ignored(loaded: Any, greedy: Any, make_pool: Any, run: Any) -> None:
    whole = greedy("llama", PROMPT, 8)
    model = loaded("llama", eos_token_id=whole[2])
    pool = make_pool(model)
    cut = whole[: whole.index(whole[2]) + 1]
    assert run(TorchEngine(model, pool), request("a"), request("b", ignore_eos=True)) == [cut, whole]


def test_stop_strings_need_a_tokenizer(model: Any, make_pool: Any) -> None:
    engine = TorchEngine(model, make_pool(model))
    with pytest.raises(RequestRefused, match="tokenizer"):
        engine.add(request(stop=("x",)))
    assert not engine.has_work


def test_forced_tokens_replace_the_drawn_ones(model: Any, make_pool: Any, run: Any) -> None:
    forced = (7, 9, 7, 400)
    sequence = request(forced=forced, max_new_tokens=20, stop_token_ids=(9,))
    other = request("o")
    assert run(TorchEngine(model, make_pool(model)), sequence, other)[0] == list(forced)
    assert sequence.finish_reason == "stop"


def test_forced_answer_continues_where_another_instance_stopped(model: Any, make_pool: Any, run: Any) -> None:
    forced = (7, 9, 7, 400)
    sequence = request(tokens=(*PROMPT, 7), num_prompt=len(PROMPT), forced=forced)
    assert run(TorchEngine(model, make_pool(model)), sequence) == [list(forced)]
    short = request(forced=forced, max_new_tokens=1)
    assert run(TorchEngine(model, make_pool(model)), short) == [[7]]
    assert short.finish_reason == "length"


def test_a_seeded_answer_is_the_same_alone_in_a_batch_and_handed_over(model: Any, make_pool: Any, run: Any) -> None:
    drawn = {"temperature": 1.0, "top_p": 0.9, "seed": 11, "max_new_tokens": 12}
    [alone] = run(TorchEngine(model, make_pool(model)), request(**drawn))
    others = [request(str(i), PROMPT[i:], temperature=1.0) for i in range(5)]
    assert run(TorchEngine(model, make_pool(model)), *others, request(**drawn))[-1] == alone
    resumed = request(tokens=(*PROMPT, *alone[:5]), num_prompt=len(PROMPT), **drawn)
    assert run(TorchEngine(model, make_pool(model)), resumed) == [alone]
    assert run(TorchEngine(model, make_pool(model)), request(**{**drawn, "seed": 12})) != [alone]


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_cancel_at_any_time(steps: int, model: Any, make_pool: Any, run: Any, greedy: Any) -> None:
    pool = make_pool(model)
    engine = TorchEngine(model, pool, EngineConfig(step_tokens=16, max_sequences=4))
    sequence, other = request("c"), request("o")
    engine.add(sequence)
    engine.add(other)
    for _ in range(steps):
        engine.step()
    assert engine.cancel("c")
    events = engine.step()
    assert [(e.request_id, e.token, e.finish_reason) for e in events if e.request_id == "c"] == [
        ("c", None, "cancelled")
    ]
    assert not engine.cancel("c")
    assert sequence.finish_reason == "cancelled"
    pool.free(sequence.blocks)  # they stay the owner's
    assert run(engine) == []
    assert other.answer == greedy("llama", PROMPT, 8)


def test_refused_requests_leave_nothing_behind(model: Any, make_pool: Any) -> None:
    engine_pool = make_pool(model, num_blocks=8)
    engine = TorchEngine(model, engine_pool)
    blocks = engine_pool.alloc(2)
    impossible = [
        request(tokens=(3, 500)),
        request(tokens=(-1, 3)),
        request(forced=(3, 500)),
        request(tokens=()),
        request(tokens=(1,) * 2048),
        request(tokens=(1,) * 129),
        request(num_computed=16),
        request(blocks=blocks, num_computed=40),
        request(blocks=blocks, num_computed=-1),
        request(tokens=(1, 2, 3), num_prompt=1, max_new_tokens=2),
        request(forced=()),
        request(tokens=(*PROMPT, 1), num_prompt=len(PROMPT), forced=(1, 2, 3), max_new_tokens=1),
    ]
    for sequence in impossible:
        with pytest.raises(RequestRefused):
            engine.add(sequence)
    assert not engine.has_work
    engine.add(request("twice"))
    with pytest.raises(RequestRefused, match="already"):
        engine.add(request("twice"))
    engine.check()


def test_blocks_that_are_not_held_are_refused_before_they_can_stop_a_step(model: Any, make_pool: Any) -> None:
    pool = make_pool(model)
    engine = TorchEngine(model, pool)
    freed = pool.alloc(2)
    pool.free(freed)
    with pytest.raises(StaleHandle):
        engine.add(request(blocks=freed, num_computed=32))
    with pytest.raises(UnknownBlock):
        engine.add(request(blocks=make_pool(model).alloc(2), num_computed=32))
    assert not engine.has_work


def test_the_longest_prompt_that_fits_is_served(model: Any, make_pool: Any, run: Any) -> None:
    pool = make_pool(model, num_blocks=8)
    sequence = request(tokens=(5,) * 128, max_new_tokens=1)
    assert len(run(TorchEngine(model, pool), sequence)[0]) == 1
    assert sequence.finish_reason == "length"


def test_positions_end_an_answer(loaded: Any, make_pool: Any, run: Any) -> None:
    model = loaded("llama", max_position_embeddings=64)
    sequence = request(max_new_tokens=1000)
    run(TorchEngine(model, make_pool(model)), sequence)
    assert (len(sequence.tokens), sequence.finish_reason) == (64, "length")


def test_a_sequence_that_outgrows_the_pool_fails_alone(model: Any, make_pool: Any, run: Any, greedy: Any) -> None:
    pool = make_pool(model, num_blocks=6)
    engine = TorchEngine(model, pool)
    big, small = request("big", max_new_tokens=500), request("small")
    engine.add(big)
    engine.add(small)
    while engine.has_work:
        for event in engine.step():
            if event.finish_reason:
                pool.free({"big": big, "small": small}[event.request_id].blocks)
        engine.check()
        assert not engine.stalled
    assert big.finish_reason == "error"
    assert isinstance(big.error, OutOfBlocks)
    assert big.answer[:8] == small.answer == greedy("llama", PROMPT, 8)
    assert len(big.tokens) == 6 * 16 + 1


def test_memory_pressure_preempts_the_youngest_and_answers_stay_the_same(
    model: Any, make_pool: Any, run: Any, greedy: Any
) -> None:
    pool = make_pool(model, num_blocks=9)
    engine = TorchEngine(model, pool, EngineConfig(step_tokens=64, max_sequences=8))
    sequences = [request(str(i), PROMPT[: 30 + i], max_new_tokens=40) for i in range(4)]
    for sequence in sequences:
        engine.add(sequence)
    finished: list[str] = []
    while engine.has_work:
        for event in engine.step():
            if event.finish_reason:
                finished.append(event.request_id)
                pool.free(sequences[int(event.request_id)].blocks)
        engine.check()
        pool.check()
    assert [s.answer for s in sequences] == [greedy("llama", PROMPT[: 30 + i], 40) for i in range(4)]
    assert finished == ["0", "1", "2", "3"]
    assert sequences[0].num_preemptions == 0
    assert engine.stats().preemptions == sum(s.num_preemptions for s in sequences) > 0


def test_an_engine_without_memory_says_so_and_goes_on_when_there_is_some(
    model: Any, make_pool: Any, run: Any, greedy: Any
) -> None:
    pool = make_pool(model, num_blocks=6)
    engine = TorchEngine(model, pool)
    held = pool.alloc(5)
    sequence = request()
    engine.add(sequence)
    assert engine.step() == []
    assert engine.stalled
    assert engine.has_work
    assert not sequence.finished
    pool.free(held)
    assert run(engine) == []
    assert not engine.stalled
    assert sequence.answer == greedy("llama", PROMPT, 8)


def test_nan_in_one_sequence_fails_it_alone(model: Any, make_pool: Any, run: Any, greedy: Any) -> None:
    pool = make_pool(model)
    engine = TorchEngine(model, pool)
    first = request()
    run(engine, first)
    pool.view(Tier.HBM)[pool.slots(first.blocks[:1])] = np.nan
    poisoned, healthy = request("p", blocks=first.blocks[:2], num_computed=32), request("h", PROMPT[:20])
    assert run(engine, healthy, poisoned)[0] == greedy("llama", PROMPT[:20], 8)
    assert poisoned.finish_reason == "error"
    assert isinstance(poisoned.error, NotFinite)
    assert poisoned.error.position == len(PROMPT)
    # freed with NaN in it, the block serves another request
    pool.free(first.blocks[:1])
    reused = [request(str(i), PROMPT[:17]) for i in range(20)]
    assert run(engine, *reused) == [greedy("llama", PROMPT[:17], 8)] * 20


@pytest.mark.parametrize("length", [21, 22, 40])
def test_a_received_partial_block_is_continued(length: int, model: Any, make_pool: Any, run: Any, greedy: Any) -> None:
    pool = make_pool(model)
    engine = TorchEngine(model, pool)
    first = request()
    run(engine, first)
    pool.view(Tier.HBM)[pool.slots(first.blocks[1:2])[0], :, :, 4:] = np.nan  # what lies behind 20 tokens is anything
    continued = request(tokens=PROMPT[:length], blocks=first.blocks[:2], num_computed=20)
    assert run(engine, continued) == [greedy("llama", PROMPT[:length], 8)]


def test_a_pool_of_another_layout_is_refused(model: Any, loaded: Any, make_pool: Any) -> None:
    with pytest.raises(LayoutMismatch) as refused:
        TorchEngine(model, make_pool(loaded("mha")))
    assert refused.value.ours == model.layout.fingerprint()


def test_close_ends_everything_once(model: Any, make_pool: Any) -> None:
    engine = TorchEngine(model, make_pool(model))
    sequence = request()
    engine.add(sequence)
    engine.step()
    engine.close()
    engine.close()
    assert sequence.finish_reason == "cancelled"
    assert len(sequence.blocks) == 3
    for call in (engine.step, lambda: engine.add(request("x"))):
        with pytest.raises(InstanceClosed):
            call()


@pytest.mark.parametrize(
    "settings", [{"step_tokens": 0}, {"max_sequences": True}, {"num_threads": -1}, {"step_tokens": 8}]
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EngineConfig(**settings)


def test_both_memory_orders_give_the_same_tokens(model: Any, make_pool: Any, run: Any, greedy: Any) -> None:
    engine = TorchEngine(model, make_pool(model, order="layered"), EngineConfig(step_tokens=16, max_sequences=4))
    sequences = [request(str(n), PROMPT[:n]) for n in (40, 3, 17)]
    assert run(engine, *sequences) == [greedy("llama", PROMPT[:n], 8) for n in (40, 3, 17)]


def test_bfloat16_kv_is_that_of_float32_rounded(model_path: Any, model: Any, make_pool: Any, run: Any) -> None:
    half = load_model(model_path("llama"), dtype="bfloat16")
    written = []
    for loaded in (model, half):
        pool, sequence = make_pool(loaded), request(max_new_tokens=1)
        run(TorchEngine(loaded, pool, EngineConfig(step_tokens=16, max_sequences=4)), sequence)
        kv = pool.view(Tier.HBM)[pool.slots(sequence.blocks[:2])]
        widened = (kv.astype(np.uint32) << 16).view(np.float32) if kv.dtype == np.uint16 else kv
        written.append(widened)
    full, rounded = written
    assert np.abs(full - rounded).max() < 0.05 * np.abs(full).max()


def test_blocks_hold_what_transformers_own_cache_holds(model: Any, make_pool: Any, run: Any, reference: Any) -> None:
    pool, sequence = make_pool(model), request()
    run(TorchEngine(model, pool, EngineConfig(step_tokens=16, max_sequences=4)), sequence)
    cache = reference("llama")(torch.tensor([sequence.tokens[:-1]]), use_cache=True).cache
    kv = pool.view(Tier.HBM)[pool.slots(sequence.blocks)]  # [blocks, layers, parts, 16, heads, dim]
    for layer in range(model.layout.num_layers):
        for part, theirs in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
            ours = kv[:, layer, part].reshape(-1, *kv.shape[4:])[: sequence.num_computed]
            assert np.abs(ours - theirs[0].transpose(0, 1).detach().numpy()).max() < 1e-4
