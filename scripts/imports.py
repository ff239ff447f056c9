"""Check the import contracts of pyproject.toml on the source tree.

An editable install redirects `poolweave` file by file, which import-linter cannot walk; typings/ shows the same
packages as one plain tree.
"""

from __future__ import annotations

import sys
from pathlib import Path

from importlinter import cli

ROOT = Path(__file__).parent.parent


def main() -> int:
    sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
    sys.path.insert(0, str(ROOT / "typings"))
    return cli.lint_imports(
        config_filename=str(ROOT / "pyproject.toml"), cache_dir=str(ROOT / "build" / "import_linter")
    )


if __name__ == "__main__":
    sys.exit(main())
