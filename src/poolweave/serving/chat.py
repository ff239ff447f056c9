"""From words to tokens: the chat template of a tokenizer, applied so that a prompt's prefix never changes.

The next prompt of a session is always history tokens + answer tokens + delta tokens. Rendering the whole conversation
again could tokenize the answer differently, and one different token ends all reuse behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poolweave.errors import ConfigError, ModelNotFound

_ANSWER = "\ue000answer\ue000"  # private-use characters: in no user's text and in no template


class Chat:
    """The template of one tokenizer of `transformers`. Raises ConfigError when it has none, or rewrites history."""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the model has no tokenizer with a chat template; sessions need one, choose an instruct model",
                setting="model",
            )
        self._tokenizer = tokenizer
        self._end = self._end_of_turn()

    def opening(self, user: str, system: str | None = None) -> list[int]:
        """The first prompt of a session, up to where the answer begins."""
        return self._encode(self._render([*_system(system), {"role": "user", "content": user}], start_answer=True))

    def delta(self, user: str, answer: Sequence[int]) -> list[int]:
        """What stands between the tokens of `answer` and the next answer: its end, the user's words, the new start.

        An answer that was cut off by its length lacks the template's end of turn; it comes first then.
        """
        talk = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": user},
        ]
        rest = self._render(talk, start_answer=True).partition(_ANSWER)[2]
        ended = bool(self._end) and answer[-len(self._end) :] == self._end
        tokens = self._encode(rest)
        return tokens[len(self._end) :] if ended else tokens

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as a user reads them."""
        decoded: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return decoded.strip()

    def _end_of_turn(self) -> list[int]:
        """The special tokens that close an answer, as the template writes them; empty when it writes none."""
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        head, found, rest = self._render(talk, start_answer=False).partition(_ANSWER)
        if not found or not head:
            raise ConfigError("the chat template leaves out the answers given; it cannot be extended", setting="model")
        special = set(self._tokenizer.all_special_ids)
        tokens = self._encode(rest)
        length = next((n for n, token in enumerate(tokens) if token not in special), len(tokens))
        return tokens[:length]

    def _render(self, talk: list[dict[str, str]], *, start_answer: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=start_answer)
        return text

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens


def _system(text: str | None) -> list[dict[str, str]]:
    return [] if text is None else [{"role": "system", "content": text}]


def load_chat(model: str) -> Chat:
    """The chat of a model: `"smollm2"`, or a local directory with a tokenizer. Raises ModelNotFound, ConfigError."""
    from transformers import AutoTokenizer

    from poolweave.serving.engine.smollm2 import smollm2_directory

    folder = smollm2_directory() if model == "smollm2" else Path(model)
    if not folder.is_dir():
        raise ModelNotFound(f"{folder} is no directory; give a local Hugging Face model directory", path=str(folder))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} has no tokenizer that loads: {error}", setting="model", value=model) from error
    return Chat(tokenizer)
