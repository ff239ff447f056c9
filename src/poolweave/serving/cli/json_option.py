"""The option --json, the same for every command: what it found goes to stdout as JSON, alone; all else to stderr."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object a line, and nothing else.")]


def say(found: Any) -> None:
    """On one line, written at once."""
    typer.echo(json.dumps(found))
