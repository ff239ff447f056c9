"""The text of an answer as a client may see it: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from poolweave.serving.engine.detokenizer import StopStrings, TextStream


class AnswerText:
    """Takes tokens, gives the text that is certain. What could be the start of a stop string is held back."""

    def __init__(self, stream: TextStream, stop: Sequence[str]) -> None:
        self._stream = stream
        self._stop = tuple(stop)
        self._strings = StopStrings(stop)
        self._given = 0
        self.stopped = False

    def add(self, token: int) -> str:
        """-> the text that became certain with `token`; after a stop string nothing comes any more."""
        return "" if self.stopped else self._certain(self._stream.append(token))

    def end(self) -> str:
        """The answer is over: -> what is left of it."""
        if self.stopped:
            return ""
        certain = self._certain(self._stream.flush())
        if self.stopped:
            return certain
        return certain + self._give(len(self._stream.text))

    def _certain(self, added: str) -> str:
        if not self._stop or not added:
            return self._give(len(self._stream.text))
        text = self._stream.text
        found = self._strings.find(text, len(added))
        if found is not None:
            self.stopped = True
            return self._give(text.find(found, self._given))
        return self._give(len(text) - self._held_back(text))

    def _held_back(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = max(len(stop) for stop in self._stop) - 1
        for length in range(min(longest, len(text) - self._given), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0

    def _give(self, until: int) -> str:
        given, self._given = self._given, max(self._given, until)
        return self._stream.text[given : self._given]
