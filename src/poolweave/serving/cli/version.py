"""`poolweave version`."""

from __future__ import annotations

import typer

from poolweave import __version__
from poolweave.serving.cli.json_option import Json, say


def version(as_json: Json = False) -> None:
    """Print the version."""
    if as_json:
        say({"poolweave": __version__})
    else:
        typer.echo(__version__)
