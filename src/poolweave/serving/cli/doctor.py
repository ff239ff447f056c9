"""`poolweave doctor`."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Show what is active here, what is not and why, with the fix for each."""
    from poolweave.serving.doctor import as_json, as_text, examine, exit_code

    checks = examine()
    typer.echo(as_json(checks) if json else as_text(checks))
    raise typer.Exit(exit_code(checks))
