"""The requests of OpenAI's protocol that this door takes, as it documents them in /openapi.json.

Fields that change the answer and are not supported are refused by name with 400; those that change nothing are taken
and ignored; unknown ones are refused, with what was meant.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

_MAX_TOKENS = 1 << 24
_MAX_TOKEN = 2**31 - 1
_SURROGATE = re.compile("[\ud800-\udfff]")
T = TypeVar("T")


def _whole_characters(value: T) -> T:
    """JSON can spell half a character (a lone surrogate), which no encoding and no tokenizer knows."""
    items = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    for item in items:
        text = item.text if isinstance(item, TextPart) else item
        if isinstance(text, str) and _SURROGATE.search(text):
            raise ValueError("the text has half a character, a lone surrogate such as \\ud800; send whole ones")
    return value


_Whole = AfterValidator(_whole_characters)


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk tells the tokens used."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {}  # field: the values that ask for nothing

    model: str = Field(max_length=1024)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    stop: Annotated[str | Annotated[list[str], Field(max_length=16)] | None, _Whole] = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=64)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    ignore_eos: bool = False
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=1024), _Whole] = None
    user: Annotated[str | None, Field(max_length=1024), _Whole] = None
    session_id: Annotated[str | None, Field(max_length=1024), _Whole] = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name in value:
            if name not in cls.model_fields:
                close = difflib.get_close_matches(str(name), cls.model_fields, n=1, cutoff=0.6)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"unknown parameter {str(name)[:100]!r}{hint}")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; an empty one asks for nothing."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def unsupported(self) -> tuple[str, Any] | None:
        """The first field that asks for what this door cannot do, and its value."""
        for name, harmless in {**_NEVER, **self.refused}.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                return name, value
        return None


_NEVER: dict[str, tuple[Any, ...]] = {
    "n": (1,), "logit_bias": ({},), "presence_penalty": (0,), "frequency_penalty": (0,), "min_tokens": (0,),
}  # fmt: skip


class TextPart(BaseModel):
    """A piece of a message. Only text can be answered."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = None


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[TextPart] | None, _Whole] = None

    @property
    def unsupported(self) -> str | None:
        """What in it cannot be answered."""
        if isinstance(self.content, list):
            for part in self.content:
                if part.type != "text" or part.text is None:
                    return f"a content part of type {part.type[:100]!r}"
        return None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        "logprobs": (False,), "top_logprobs": (0,), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
        "function_call": ("none", "auto"), "response_format": ({"type": "text"},), "modalities": (["text"],),
        "audio": (), "prediction": (), "reasoning_effort": ("none",), "verbosity": (),
    }  # fmt: skip

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None

    @property
    def limit(self) -> int | None:
        """Tokens of the answer at most."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


_Token = Annotated[int, Field(ge=0, le=_MAX_TOKEN)]


def _named_token(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """What is wrong with a prompt of token ids is told of the token, not of all that a prompt may be."""
    try:
        return validate(value)
    except ValidationError:
        lists = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
        for tokens in lists:
            for at, token in enumerate(tokens if isinstance(tokens, list) else ()):
                if isinstance(token, (int, float)) and (isinstance(token, float) or not 0 <= token <= _MAX_TOKEN):
                    raise ValueError(
                        f"token {at} is {str(token)[:100]}, which is no token id; those go from 0 to {_MAX_TOKEN}"
                    ) from None
        raise


class CompletionRequest(_Request):
    """POST /v1/completions. `prompt`: a text or token ids; a list of one of them is that one."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        "best_of": (1,), "echo": (False,), "logprobs": (0,), "suffix": ("",)
    }  # fmt: skip

    prompt: Annotated[str | list[_Token] | list[str] | list[list[_Token]], WrapValidator(_named_token), _Whole]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None

    @property
    def limit(self) -> int:
        """Tokens of the answer at most: the protocol's default is 16."""
        return 16 if self.max_tokens is None else self.max_tokens
