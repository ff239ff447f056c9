"""`poolweave version`."""

from __future__ import annotations

import typer

from poolweave import __version__


def version() -> None:
    """Print the version."""
    typer.echo(__version__)
