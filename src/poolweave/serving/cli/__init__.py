"""The command `poolweave`. Errors are one line on stderr and a non-zero exit code, never a traceback."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from poolweave.errors import PoolweaveError


def main() -> None:
    """Entry point. Exit code 0: it went well; 1: it did not; 2: wrong usage; 130: interrupted."""
    try:
        cli: Any = importlib.import_module("poolweave.serving.cli.app")
        cli.app()
    except PoolweaveError as error:
        _fail(f"{type(error).__name__}: {error}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "poolweave"):
            raise
        extra = _EXTRAS.get(missing, "demo")
        _fail(
            f"this needs the package {missing}, which is not installed: pip install 'poolweave[{extra}]' "
            "(what else is missing says: python -m poolweave.serving.doctor.checkup)"
        )
    except OSError as error:  # a file that cannot be written, a full disk
        named = "" if error.filename is None else f": {error.filename}"
        _fail(f"{error.strerror or type(error).__name__}{named}")
    except KeyboardInterrupt:
        _fail("interrupted", code=130)


_EXTRAS = {
    **dict.fromkeys(("typer", "rich", "fastapi", "uvicorn", "prometheus_client", "jinja2", "httpx"), "serve"),
    **dict.fromkeys(("torch", "transformers", "safetensors"), "engine"),
    "scipy": "plan",
    "etcd3gw": "etcd",
}


def _fail(message: str, code: int = 1) -> None:
    sys.stderr.write(f"poolweave: {message}\n")
    sys.exit(code)
