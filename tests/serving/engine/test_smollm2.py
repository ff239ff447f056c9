"""The real model: greedy tokens equal `transformers`, and its answers are text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from poolweave.serving.engine import EngineConfig, SamplingParams, Sequence, TorchEngine

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]  # busy machines

TEXT = "The history of computing began long before electronic machines. " * 50
LENGTHS = [1, 15, 16, 17, 500]
NEW = 5


def prompt(model: Any, length: int) -> list[int]:
    return list(model.tokenizer(TEXT)["input_ids"][:length])


def assert_greedy(reference: Any, sequence: Sequence) -> None:
    """Each token is the reference's best after all before it: what greedy decoding without a cache gives."""
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([sequence.tokens[:-1]]), use_cache=False).logits[0]
    assert sequence.answer == logits[sequence.num_prompt - 1 :].argmax(-1).tolist()


def test_tokens_equal_transformers(loaded: Any, make_pool: Any, reference: Any, run: Any) -> None:
    model = loaded("smollm2")
    pool = make_pool(model, num_blocks=96)
    engine = TorchEngine(model, pool, EngineConfig(step_tokens=192, max_sequences=8))
    batch = [Sequence(str(n), prompt(model, n), SamplingParams(max_new_tokens=NEW)) for n in LENGTHS]
    run(engine, *batch)
    for sequence in batch:
        assert_greedy(reference("smollm2"), sequence)
    prefix = batch[-1].blocks[:30]
    again = Sequence("again", prompt(model, 500), SamplingParams(max_new_tokens=NEW), blocks=prefix, num_computed=480)
    [alone] = run(engine, Sequence("alone", prompt(model, 17), SamplingParams(max_new_tokens=NEW)))
    assert run(engine, again) == [batch[-1].answer]
    assert alone == batch[3].answer


def test_a_chat_answer_and_its_stop_string(loaded: Any, make_pool: Any, run: Any) -> None:
    model = loaded("smollm2")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = model.tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    tokens = list(model.tokenizer(text)["input_ids"])
    engine = TorchEngine(model, make_pool(model, num_blocks=16))
    whole = Sequence("whole", tokens, SamplingParams(max_new_tokens=24))
    cut = Sequence("cut", tokens, SamplingParams(max_new_tokens=24, stop=("never", " Paris")))
    run(engine, whole, cut)
    assert whole.finish_reason == "stop"  # the end of a chat turn
    assert whole.tokens[-1] in model.eos_token_ids
    assert "Paris" in model.tokenizer.decode(whole.answer)
    assert (cut.finish_reason, cut.matched_stop) == ("stop", " Paris")
    assert cut.answer == whole.answer[: len(cut.answer)]
    assert model.tokenizer.decode(cut.answer).endswith(" Paris")
