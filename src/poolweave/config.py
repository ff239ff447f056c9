"""One loader for every setting file: TOML into frozen dataclasses, with unknown keys refused by name.

A section of the file is a field whose type is a dataclass, an array of tables a tuple of dataclasses. It knows no
component: the dataclass is the schema, its `__post_init__` the check of ranges.
"""

from __future__ import annotations

import dataclasses
import difflib
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
        raise _explain(error, where) from error


def to_mapping(value: Any) -> dict[str, Any]:
    """A config dataclass as plain dicts and lists: what `from_mapping` takes back."""
    built: dict[str, Any] = msgspec.to_builtins(value)
    return built


def _explain(error: msgspec.ValidationError, where: str) -> ConfigError:
    """msgspec wraps what `__post_init__` raised; the original message and numbers are the better ones."""
    cause = error.__cause__
    if isinstance(cause, PoolweaveError):
        numbers = {name: getattr(cause, name) for name in cause.fields if name in ConfigError.fields}
        return ConfigError(f"{where}: {cause}", **numbers)
    message, _, place = str(error).partition(" - at `$")
    setting = place.rstrip("`").lstrip(".")
    return ConfigError(f"{where}: {setting or 'the file'}: {message}", setting=setting or None)


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
