"""Answers held against transformers alone: no pool, no transfer, no CrossPool, one forward over prompt and answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from poolweave.serving.checked import Checked
from poolweave.serving.engine.models import no_progress_bars
from poolweave.serving.flow_comparison.oracle import Asked

_TIE = 1e-4  # nearer than this, two logits may come in either order: sums are rounded differently


def check_answers(path: str, asked: Iterable[tuple[str, Asked]], *, num_threads: int) -> Checked:
    """`asked`: requests by what they are called, greedy all. Loads the model in `path`, in float32."""
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
        tokens = ties = 0
        wrong: list[str] = []
        for name, request in asked:
            for position, (token, lead) in enumerate(_leads(model, request)):
                tokens += 1
                ties += 0.0 < lead <= _TIE
                if lead > _TIE:
                    wrong.append(f"{name}: token {position + 1} is {token}, {lead:.4f} under the best")
        return Checked(tokens=tokens, ties=ties, wrong=tuple(wrong))
    finally:
        torch.set_num_threads(threads)


def _leads(model: Any, request: Asked) -> Iterator[tuple[int, float]]:
    """Each token of the answer, and how far its logit is under the highest."""
    text = torch.tensor([[*request.prompt, *request.answer]])
    with torch.inference_mode():
        logits = model(input_ids=text[:, :-1], use_cache=False).logits[0, len(request.prompt) - 1 :]
    for row, token in zip(logits, request.answer, strict=True):
        yield token, float(row.max() - row[token])
