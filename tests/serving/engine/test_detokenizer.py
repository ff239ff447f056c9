"""Growing text: the pieces join to the whole, characters come when they are complete, stop strings across pieces."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

from poolweave.serving.engine.detokenizer import StopStrings, TextStream

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a byte: every character beyond ASCII spans tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={text: index for index, text in enumerate(alphabet)}, merges=[])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])


@given(text=st.text(max_size=30).filter(lambda text: "\ufffd" not in text), cut=st.integers(0, 10))
def test_pieces_join_to_the_text(tokenizer: Any, text: str, cut: int) -> None:
    tokens = ids(tokenizer, "prompt: " + text)
    stream = TextStream(tokenizer, tokens[:8])
    pieces = [stream.append(token) for token in tokens[8:]]
    assert "".join(pieces) == stream.text == text
    assert stream.flush() == ""


def test_a_character_comes_once_and_whole(tokenizer: Any) -> None:
    stream = TextStream(tokenizer)
    assert [stream.append(token) for token in ids(tokenizer, "a日b")] == ["a", "", "", "日", "b"]


def test_flush_shows_an_incomplete_character_as_replacement(tokenizer: Any) -> None:
    stream = TextStream(tokenizer)
    for token in ids(tokenizer, "a日")[:-1]:
        stream.append(token)
    assert (stream.text, stream.flush(), stream.flush()) == ("a", "\ufffd", "")


def test_cost_of_a_token_does_not_grow_with_the_answer(tokenizer: Any) -> None:
    decoded: list[int] = []

    class Counting:
        def decode(self, tokens: list[int], **kwargs: Any) -> str:
            decoded.append(len(tokens))
            return str(tokenizer.decode(tokens, **kwargs))

    stream = TextStream(Counting())
    for token in ids(tokenizer, "word " * 100):
        stream.append(token)
    assert max(decoded) <= 8


@pytest.mark.parametrize(
    ("pieces", "found"),
    [
        (["ab", "STO", "Pc"], "STOP"), (["STOP"], "STOP"), (["S", "T", "O", "P"], "STOP"), (["STO", "STO"], None),
        (["xEN", "D STOP"], "END"), (["ENSTOPD"], "STOP"), ([], None),
    ],
)  # fmt: skip
def test_stop_strings_across_pieces(pieces: list[str], found: str | None) -> None:
    stops, text, result = StopStrings(("STOP", "END")), "", None
    for piece in pieces:
        text += piece
        result = result or stops.find(text, len(piece))
    assert result == found


def test_stop_strings_look_only_at_what_is_new() -> None:
    assert StopStrings(("aa",)).find("aab" + "c" * 10, 1) is None
    assert StopStrings(()).find("anything", 3) is None
