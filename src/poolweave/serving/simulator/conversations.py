"""Made-up conversations: a turn's prompt is all that was said before, the answers included, and a new question.

Knows no file: recorded conversations are loaded by trace_files.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from poolweave.errors import ConfigError
from poolweave.serving.simulator.traces import TokenSource, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """`sessions` of `turns` requests each. Nothing but its own past is common to a session."""

    sessions: int
    turns: int = 5
    first_tokens: int = 1024  # of the first question, with what it is about
    question_tokens: int = 128  # of each later one
    answer_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (self.sessions, self.turns, self.first_tokens, self.question_tokens, self.answer_tokens)
        if min(counts) < 1:
            raise ConfigError(f"conversations need counts above zero, got {self}", setting="conversations")

    def trace(self) -> Trace:
        """All requests at time 0, sessions interleaved turn by turn; see `Trace.at_rate`."""
        source = TokenSource(16)
        said: list[list[Any]] = [[] for _ in range(self.sessions)]
        made = []
        for turn in range(self.turns):
            for session, parts in enumerate(said):
                label = f"conversation-{self.seed}-{session}-{turn}"
                parts.append(source.tokens(label, self.question_tokens if turn else self.first_tokens))
                answer = source.tokens(f"{label}-answer", self.answer_tokens)
                made.append(source.request(0.0, parts, answer, f"session-{session}"))
                parts.append(answer)
        return Trace(name="conversations", block_tokens=source.block_tokens, requests=tuple(made))
