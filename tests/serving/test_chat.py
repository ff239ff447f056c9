"""Chat templates applied so that a session's history never changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from ref_transformers import save_tokenizer  # noqa: E402

from poolweave.errors import ConfigError, ModelNotFound  # noqa: E402
from poolweave.serving.chat import Chat, load_chat  # noqa: E402

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return transformers.AutoTokenizer.from_pretrained(save_tokenizer(tmp_path_factory.mktemp("tok")))


def test_the_opening_ends_where_the_answer_begins(tokenizer: Any) -> None:
    tokens = Chat(tokenizer).opening("Hi", "Be kind")
    assert tokenizer.decode(tokens) == (
        "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("ended", [True, False])
def test_history_answer_and_delta_render_as_the_whole_talk_does(tokenizer: Any, ended: bool) -> None:
    """Whether the model closed its answer or its length cut it off, the end of turn stands there once."""
    chat = Chat(tokenizer)
    answer = tokenizer.encode("Hello you", add_special_tokens=False)
    if ended:
        answer.append(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    opening = chat.opening("Hi", "Be kind")
    prompt = [*opening, *answer, *chat.delta("And?", answer)]
    whole = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be kind"},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello you"},
            {"role": "user", "content": "And?"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert tokenizer.decode(prompt) == whole
    assert prompt[: len(opening) + len(answer)] == [*opening, *answer], "the history is kept token by token"


def test_an_answer_with_odd_tokens_is_kept_as_it_is(tokenizer: Any) -> None:
    """Tokens that decoding and encoding again would merge or lose stay: reuse depends on them."""
    chat = Chat(tokenizer)
    answer = [200, 201, 202, 199]
    assert chat.delta("x", answer) == chat.delta("x", [7])


def test_a_tokenizer_without_a_template_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        Chat(None)
    bare = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ConfigError, match="choose an instruct model"):
        Chat(bare)


def test_a_template_that_drops_answers_is_refused(tokenizer: Any) -> None:
    forgetful = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    forgetful.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ConfigError, match="leaves out the answers"):
        Chat(forgetful)


def test_loading_names_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere is no directory") as caught:
        load_chat(str(tmp_path / "nowhere"))
    assert caught.value.path == str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no tokenizer that loads"):
        load_chat(str(tmp_path))
