"""One loader for every setting file: TOML into frozen dataclasses, with unknown keys refused by name.

A section of the file is a field whose type is a dataclass, an array of tables a tuple of dataclasses. It knows no
component: the dataclass is the schema, its `__post_init__` the check of ranges.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from poolweave.errors import ConfigError, PoolweaveError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


def load(path: str | Path, kind: type[T]) -> T:
    """The TOML file at `path` as a `kind`.

    Raises ConfigError naming the file, the key and what to write instead: unreadable file, TOML that does not parse,
    unknown or misspelt key, wrong type, value out of range.
    """
    return from_mapping(read_mapping(path), kind, where=str(path))


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The TOML file at `path` as it stands. Raises ConfigError for one that cannot be read or parsed."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the config file {path}: {reason}", setting="config", value=str(path)) from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", setting="config", value=str(path)) from error


def from_mapping(mapping: Mapping[str, Any], kind: type[T], *, where: str = "config") -> T:
    """`mapping` (as TOML or JSON gives it) as a `kind`. `where` heads the error messages. Raises as `load` does."""
    for path, key, value, known in _unknown_keys(mapping, kind, ""):
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        advice = f"did you mean {close[0]!r}?" if close else f"known keys are {', '.join(sorted(known))}"
        raise ConfigError(f"{where}: unknown key {path + key!r}; {advice}", setting=path + key, value=value)
    try:
        return msgspec.convert(mapping, kind)
    except msgspec.ValidationError as error:
        raise _explain(error, kind, where) from error


def to_mapping(value: Any) -> dict[str, Any]:
    """A config dataclass as plain dicts and lists: what `from_mapping` takes back."""
    built: dict[str, Any] = msgspec.to_builtins(value)
    return built


def toml_text(mapping: Mapping[str, Any]) -> str:
    """`mapping` as the text of a TOML file: what is None is left out, a mapping in it is a section of its own."""
    lines: list[str] = []
    _toml_section(mapping, (), lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _toml_section(mapping: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    sections = {key: value for key, value in mapping.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in mapping.items() if key not in sections and value is not None}
    if path and (plain or not sections):
        lines += ["", f"[{'.'.join(json.dumps(part) if '.' in part else part for part in path)}]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in plain.items()]  # JSON's scalars and lists are TOML's
    for key, section in sections.items():
        _toml_section(section, (*path, key), lines)


_WORDS = {
    "array": "a list", "object": "a section", "str": "text", "int": "a whole number", "float": "a number",
    "bool": "true or false", "null": "nothing",
}  # fmt: skip


def _explain(error: msgspec.ValidationError, kind: Any, where: str) -> ConfigError:
    """msgspec wraps what `__post_init__` raised; the original message and numbers are the better ones."""
    cause = error.__cause__
    if isinstance(cause, PoolweaveError):
        numbers = {name: getattr(cause, name) for name in cause.fields if name in ConfigError.fields}
        return ConfigError(f"{where}: {cause}", **numbers)
    message, _, place = str(error).partition(" - at `$")
    setting = place.rstrip("`").lstrip(".")
    said = _in_words(message, kind, setting)
    return ConfigError(f"{where}: {f'{setting} ' if setting else ''}{said}", setting=setting or None)


def _in_words(message: str, kind: Any, setting: str) -> str:
    """What msgspec says of the value at `setting`, in the words of a TOML file."""
    if missing := re.fullmatch(r"Object missing required field `(.+)`", message):
        return f"lacks {missing[1]}"
    if wrong := re.fullmatch(r"Expected `(.+)`, got `(.+)`", message):
        wanted, got = ([_WORDS.get(one, one) for one in side.split(" | ")] for side in wrong.groups())
        return f"must be {' or '.join(one for one in wanted if one != _WORDS['null'])}, not {got[0]}"
    if unknown := re.fullmatch(r"Invalid enum value (.+)", message):
        known = ", ".join(_choices(kind, re.findall(r"[^.\[\]]+|\[\d*\.*\]", setting)))
        return f"{unknown[1]} is none of {known}" if known else f"cannot be {unknown[1]}"
    return f"is not right: {message}"


def _choices(kind: Any, path: list[str]) -> list[str]:
    """The words that the setting at `path` may have, where its type lists them."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(filter(None, (_choices(option, path) for option in typing.get_args(kind))), [])
    if not path:
        if typing.get_origin(kind) is typing.Literal:
            return [str(choice) for choice in typing.get_args(kind)]
        return [str(choice.value) for choice in kind] if isinstance(kind, type) and issubclass(kind, enum.Enum) else []
    if path[0].startswith("[") and typing.get_args(kind):
        return _choices(typing.get_args(kind)[0], path[1:])
    return _choices(typing.get_type_hints(kind).get(path[0]), path[1:]) if dataclasses.is_dataclass(kind) else []


def _unknown_keys(mapping: Any, kind: Any, path: str) -> Iterator[tuple[str, str, Any, list[str]]]:
    """Each key no dataclass knows: (path of its section, key, its value, the keys known there), outermost first."""
    if dataclasses.is_dataclass(kind) and isinstance(mapping, Mapping):
        hints = typing.get_type_hints(kind)
        known = [field.name for field in dataclasses.fields(kind) if field.init]
        yield from ((path, key, mapping[key], known) for key in mapping if key not in known)
        for name in known:
            if name in mapping:
                yield from _unknown_keys(mapping[name], hints[name], f"{path}{name}.")
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for option in typing.get_args(kind):
            yield from _unknown_keys(mapping, option, path)
    elif typing.get_origin(kind) in (tuple, list) and isinstance(mapping, (list, tuple)):
        for position, item in enumerate(mapping):
            yield from _unknown_keys(item, typing.get_args(kind)[0], f"{path[:-1]}[{position}].")
