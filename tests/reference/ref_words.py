"""A byte-level tokenizer with a chat template, as a model directory holds it, made without torch."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_SPECIAL = ("<pad>", "<s>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_words(folder: Path, template: str | None = _TEMPLATE) -> Path:
    """Write tokenizer.json and tokenizer_config.json. Ids 4 to 97 are the characters from `!` to `~`."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {text: n for n, text in enumerate((*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def text_of(tokens: list[int]) -> str:
    """Those ids as text."""
    return "".join(chr(token - 4 + ord("!")) for token in tokens)
