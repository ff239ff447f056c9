"""The answers of OpenAI's protocol as JSON: whole, and chunk by chunk. Knows no HTTP."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from poolweave.serving.door.ask import Ask, Outcome

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


class Documents(Protocol):
    """How one kind of answer is written down."""

    def opening(self) -> bytes:
        """What comes before the first text of a stream; b"" for nothing."""

    def piece(self, text: str) -> bytes:
        """New text of a stream."""

    def closing(self, reason: str) -> bytes:
        """The end of a stream."""

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk of a stream that asked for it."""

    def whole(self, text: str, reason: str, usage: dict[str, Any]) -> bytes:
        """The answer in one."""


def event(document: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(document) + b"\n\n"


def usage_of(ask: Ask, outcome: Outcome) -> dict[str, Any]:
    """The tokens that a request used."""
    prompt, answer = len(ask.prompt), len(outcome.answer)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": outcome.cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class _Common:
    request_id: str
    model: str
    shows_usage: bool  # then every chunk has the field, null but in the last
    created: int = field(default_factory=lambda: int(time.time()))

    def _document(self, kind: str, choices: list[Any], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        document = {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}
        document["choices"] = choices
        if usage is not None or self.shows_usage:
            document["usage"] = usage
        return document


class ChatDocuments(_Common):
    """Those of /v1/chat/completions."""

    def opening(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def piece(self, text: str) -> bytes:
        return self._chunk({"content": text}, None)

    def closing(self, reason: str) -> bytes:
        return self._chunk({}, reason)

    def usage(self, usage: dict[str, Any]) -> bytes:
        return event(self._document("chat.completion.chunk", [], usage))

    def whole(self, text: str, reason: str, usage: dict[str, Any]) -> bytes:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return _encode(self._document("chat.completion", [choice], usage))

    def _chunk(self, delta: dict[str, Any], reason: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return event(self._document("chat.completion.chunk", [choice]))


class CompletionDocuments(_Common):
    """Those of /v1/completions."""

    def opening(self) -> bytes:
        return b""

    def piece(self, text: str) -> bytes:
        return event(self._document("text_completion", [self._choice(text, None)]))

    def closing(self, reason: str) -> bytes:
        return event(self._document("text_completion", [self._choice("", reason)]))

    def usage(self, usage: dict[str, Any]) -> bytes:
        return event(self._document("text_completion", [], usage))

    def whole(self, text: str, reason: str, usage: dict[str, Any]) -> bytes:
        return _encode(self._document("text_completion", [self._choice(text, reason)], usage))

    @staticmethod
    def _choice(text: str, reason: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
