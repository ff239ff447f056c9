"""When an answer ends: stop tokens, stop strings, its length. One `Ending` a sequence."""

from __future__ import annotations

from typing import Any

from poolweave.errors import RequestRefused
from poolweave.serving.engine.detokenizer import StopStrings, TextStream
from poolweave.serving.engine.sequence import FinishReason, Sequence


class Ending:
    """Watches one sequence's answer grow. Raises RequestRefused for stop strings where the model has no tokenizer."""

    def __init__(self, sequence: Sequence, *, eos: tuple[int, ...], max_positions: int, tokenizer: Any) -> None:
        params = sequence.sampling
        self._sequence = sequence
        self._stop_tokens = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos)
        self._max_positions = max_positions
        self._stop_strings = StopStrings(params.stop)
        self._text: TextStream | None = None
        if params.stop:
            if tokenizer is None:
                raise RequestRefused("stop strings need a tokenizer and this model directory has none")
            self._text = TextStream(tokenizer, sequence.tokens[: sequence.num_prompt])
            for token in sequence.answer:
                self._text.append(token)

    def after(self, token: int) -> FinishReason | None:
        """Why the answer ends with `token`, which the sequence has just got; None when it goes on."""
        sequence = self._sequence
        if sequence.forced is not None:
            if sequence.num_answer >= len(sequence.forced):
                return "stop"
        elif token in self._stop_tokens or self._stopped_by_text(token):
            return "stop"
        full = len(sequence.tokens) >= self._max_positions
        return "length" if full or sequence.num_answer >= sequence.sampling.max_new_tokens else None

    def _stopped_by_text(self, token: int) -> bool:
        if self._text is None:
            return False
        added = self._text.append(token)
        self._sequence.matched_stop = self._stop_strings.find(self._text.text, len(added))
        return self._sequence.matched_stop is not None
