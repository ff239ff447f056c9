"""Text of an answer while it grows, and the stop strings in it. Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"  # what a decoder shows for a character whose bytes have not all come


class TextStream:
    """Turns tokens into text one at a time; characters that span tokens come when they are whole.

    Cost a token is independent of the answer's length: only the tokens since the last whole character, and the few
    before them that decide about spaces, are decoded again.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        """`prompt` gives the first tokens their context (a leading space or none); it adds no text."""
        self._tokenizer = tokenizer
        self._tokens: list[int] = list(prompt[-4:])
        self._context = 0  # [context, emitted) decoded before, [emitted, len) not yet shown
        self._emitted = len(self._tokens)
        self.text = ""

    def append(self, token: int) -> str:
        """Add a token; -> the text that became certain with it, "" while a character is incomplete."""
        self._tokens.append(token)
        before, now = self._decode(self._emitted), self._decode(len(self._tokens))
        if now.endswith(_REPLACEMENT):
            return ""
        self._context, self._emitted = self._emitted, len(self._tokens)
        return self._grow(now[len(before) :])

    def flush(self) -> str:
        """The answer is over: -> what is left, an incomplete character as the replacement character."""
        rest = self._decode(len(self._tokens))[len(self._decode(self._emitted)) :]
        self._context = self._emitted = len(self._tokens)
        return self._grow(rest)

    def _grow(self, text: str) -> str:
        self.text += text
        return text

    def _decode(self, stop: int) -> str:
        text: str = self._tokenizer.decode(self._tokens[self._context : stop], skip_special_tokens=True)
        return text


class StopStrings:
    """Finds the first of several strings in growing text, also across the borders of its pieces."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._reach = max((len(text) for text in strings), default=1) - 1

    def find(self, text: str, added: int) -> str | None:
        """The stop string that begins first in `text`, whose last `added` characters are new; None without one."""
        start = max(0, len(text) - added - self._reach)
        found = [(text.find(stop, start), stop) for stop in self._strings]
        return min(((at, stop) for at, stop in found if at >= 0), default=(0, None))[1]
