"""`poolweave config check|show`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from poolweave.serving.cli.json_option import Json, say

config = typer.Typer(help="Look at setting files.", no_args_is_help=True)
_KINDS = {  # the class, and where not all of a file is in itself, the function that loads it
    "deployment": ("poolweave.serving.deployment.config", "DeploymentConfig", "load_deployment"),
    "instance": ("poolweave.serving.instance.config", "InstanceConfig", ""),
    "demo": ("poolweave.serving.demo.config", "DemoConfig", ""),
    "calibration": ("poolweave.serving.calibration.calibration", "Calibration", "load_calibration"),
    "flows": ("poolweave.serving.flow_comparison.run", "FlowsConfig", ""),
}
_File = Annotated[Path, typer.Argument(help="The TOML file.")]
_Kind = Annotated[str, typer.Option(help=f"What it configures: {', '.join(_KINDS)}.")]


@config.command()
def check(file: _File, kind: _Kind = "deployment", as_json: Json = False) -> None:
    """Say whether a file can be used here; the first thing wrong with it otherwise."""
    from poolweave.serving.door.prompter import load_prompter
    from poolweave.serving.engine.model_directory import BUILT_IN, model_directory

    settings, _ = _read(file, kind)
    named = (settings.get("model"), *(one["path"] for one in settings.get("models", ())))
    for model in named if kind != "calibration" else ():
        if model is not None and model not in BUILT_IN:
            folder = model_directory(model)
            if settings.get("serves"):  # a door, which reads and writes text
                load_prompter(str(folder))
    if as_json:
        say({"file": str(file), "kind": kind, "usable": True})
    else:
        typer.echo(f"{file} is a usable {kind} file")


@config.command()
def show(
    file: _File,
    kind: _Kind = "deployment",
    as_json: Json = False,
) -> None:
    """Print every setting with its value and where that comes from: the file, or the default."""
    settings, given = _read(file, kind)
    rows = list(_rows(settings, given, ""))
    if as_json:
        say([{"setting": name, "value": value, "source": source} for name, value, source in rows])
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
    module, name, loader = _KINDS[kind]
    home = importlib.import_module(module)
    loaded = getattr(home, loader)(file) if loader else load(file, getattr(home, name))
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
