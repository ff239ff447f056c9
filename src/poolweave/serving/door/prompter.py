"""From words to tokens and back for one model, without torch: its tokenizer and its chat template.

The whole conversation is rendered at each turn, as every server of this protocol does. `Chat` (poolweave.serving.chat)
extends token histories instead, which a protocol of texts cannot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from poolweave.errors import ConfigError, ModelNotFound, RequestRefused
from poolweave.serving.engine.detokenizer import TextStream

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class Prompter:
    """Thread-safe. `chat` raises RequestRefused where the model has no chat template, or its template refuses."""

    def __init__(self, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
        """`settings`: those of tokenizer_config.json."""
        self._tokenizer = tokenizer
        self._special = {name: _text(settings[name]) for name in _SPECIAL if settings.get(name)}
        self._template = _compile(settings.get("chat_template"))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt's tokens, up to where the answer begins."""
        if self._template is None:
            raise RequestRefused("the model has no chat template; use /v1/completions")
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **self._special)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RequestRefused(f"the model's chat template refuses these messages: {error}") from error
        return self._encode(text, add_special_tokens=False)

    def text(self, prompt: str) -> list[int]:
        """The tokens of plain text."""
        return self._encode(prompt, add_special_tokens=True)

    def stream(self, prompt: Sequence[int]) -> TextStream:
        """The text of an answer to `prompt` as it grows."""
        return TextStream(self._tokenizer, prompt)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return tokens


def load_prompter(model: str) -> Prompter:
    """The words of a model: `"smollm2"`, or a local directory with a tokenizer. Raises ModelNotFound, ConfigError."""
    from poolweave.serving.engine.smollm2 import smollm2_directory

    folder = smollm2_directory() if model == "smollm2" else Path(model)
    if not folder.is_dir():
        raise ModelNotFound(f"{folder} is no directory; give a local Hugging Face model directory", path=str(folder))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"{folder} holds no {name}, without which a door cannot read and write text; save the model's "
                "tokenizer there",
                setting="model",
                value=model,
            )
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except Exception as error:
        raise ConfigError(f"{folder} has no tokenizer that loads: {error}", setting="model", value=model) from error
    template = folder / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    return Prompter(tokenizer, settings)


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _compile(template: Any) -> jinja2.Template | None:
    """As transformers does: a sandbox, blocks trimmed, and the few functions that templates use."""
    if not isinstance(template, str):
        return None
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox.from_string(template)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
