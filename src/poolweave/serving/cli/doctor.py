"""`poolweave doctor`."""

from __future__ import annotations

import typer

from poolweave.serving.cli.json_option import Json


def doctor(json: Json = False) -> None:
    """Show what is active here, what is not and why, with the fix for each."""
    from poolweave.serving.doctor.checkup import as_json, as_text, examine, exit_code

    checks = examine()
    typer.echo(as_json(checks) if json else as_text(checks))
    raise typer.Exit(exit_code(checks))
