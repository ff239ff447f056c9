"""Comma-separated options."""

from __future__ import annotations

import typer


def words(text: str | None) -> tuple[str, ...] | None:
    """The words of "a,b"; None for None."""
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip())


def numbers(text: str | None, kind: type[int] | type[float], name: str) -> tuple[float, ...] | None:
    """The numbers of "1,2"; None for None. A wrong one is a usage error of the option `name`."""
    found = words(text)
    try:
        return None if found is None else tuple(kind(word) for word in found)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of numbers like 1,2", param_hint=f"--{name}") from error
