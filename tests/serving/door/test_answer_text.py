"""Text as a client may see it: nothing of a stop string, nothing lost, whatever the tokens are cut into."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from poolweave.serving.door.answer_text import AnswerText
from poolweave.serving.engine.detokenizer import TextStream


class Letters:
    """A tokenizer whose tokens are characters."""

    def decode(self, tokens: list[int], **options: Any) -> str:
        return "".join(chr(token) for token in tokens)


@given(
    text=st.text("ab<", max_size=30),
    stop=st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3),
)
def test_it_is_the_text_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    answer = AnswerText(TextStream(Letters()), stop)
    shown = ""
    for character in text:
        shown += answer.add(ord(character))
        assert not any(one in shown for one in stop)
    shown += answer.end()
    ends = [text[:n] for n in range(len(text) + 1) if any(text[:n].endswith(one) for one in stop)]
    if not ends:
        assert shown == text
        return
    found = min(ends, key=len)  # the first moment at which a stop string is whole
    assert answer.stopped
    assert shown == min((found[: found.find(one)] for one in stop if one in found), key=len)


def test_what_cannot_become_a_stop_string_is_not_held_back() -> None:
    answer = AnswerText(TextStream(Letters()), ["END"])
    assert [answer.add(ord(c)) for c in "xEyENz"] == ["x", "", "Ey", "", "", "ENz"]
