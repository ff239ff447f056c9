"""`poolweave config check|show`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

config = typer.Typer(help="Look at setting files.", no_args_is_help=True)
_KINDS = {
    "deployment": ("poolweave.serving.deployment.config", "DeploymentConfig"),
    "instance": ("poolweave.serving.instance_config", "InstanceConfig"),
    "demo": ("poolweave.serving.demo", "DemoConfig"),
}
_File = Annotated[Path, typer.Argument(help="The TOML file.")]
_Kind = Annotated[str, typer.Option(help=f"What it configures: {', '.join(_KINDS)}.")]


@config.command()
def check(file: _File, kind: _Kind = "deployment") -> None:
    """Say whether a file can be used here; the first thing wrong with it otherwise."""
    from poolweave.serving.engine.model_directory import BUILT_IN, model_directory

    settings, _ = _read(file, kind)
    if settings["model"] not in BUILT_IN:
        model_directory(settings["model"])
    typer.echo(f"{file} is a usable {kind} file")


@config.command()
def show(
    file: _File,
    kind: _Kind = "deployment",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Print every setting with its value and where that comes from: the file, or the default."""
    settings, given = _read(file, kind)
    rows = list(_rows(settings, given, ""))
    if as_json:
        typer.echo(json.dumps([{"setting": name, "value": value, "source": source} for name, value, source in rows]))
        return
    width = max(len(name) for name, _, _ in rows)
    for name, value, source in rows:
        typer.echo(f"{name:<{width}}  {json.dumps(value)}  ({source})")


def _read(file: Path, kind: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """All settings, and those that the file gives."""
    import importlib

    from poolweave.config import load, read_mapping, to_mapping
    from poolweave.errors import ConfigError

    if kind not in _KINDS:
        raise ConfigError(f"kind {kind!r} is none of {', '.join(_KINDS)}", setting="kind", value=kind)
    module, name = _KINDS[kind]
    loaded = load(file, getattr(importlib.import_module(module), name))
    return to_mapping(loaded), read_mapping(file)


def _rows(value: Any, given: Any, path: str) -> Iterator[tuple[str, Any, str]]:
    """Each setting under its dotted name. An API key is never shown."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            known = given.get(name, _ABSENT) if isinstance(given, Mapping) else _ABSENT
            yield from _rows(inner, known, f"{path}.{name}" if path else name)
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
        for number, inner in enumerate(value):
            known = given[number] if isinstance(given, list) else _ABSENT
            yield from _rows(inner, known, f"{path}[{number}]")
    else:
        shown = "***" if path.endswith("].key") else value
        yield path, shown, "default" if given is _ABSENT else "file"


_ABSENT = object()
