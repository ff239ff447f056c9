"""Print the requirements of the named extras of pyproject.toml (and the base), one a line, for `pip install`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def expand(extra: str, extras: dict[str, list[str]]) -> set[str]:
    """All requirements of `extra`, with `poolweave[a,b]` replaced by what a and b need."""
    found: set[str] = set()
    for requirement in extras[extra]:
        inner = re.fullmatch(r"poolweave\[(.+)\]", requirement)
        if inner is None:
            found.add(requirement)
        else:
            for name in inner[1].split(","):
                found |= expand(name, extras)
    return found


def main() -> None:
    project = tomllib.loads(Path(__file__).parent.parent.joinpath("pyproject.toml").read_text())["project"]
    needed = set(project["dependencies"])
    for extra in sys.argv[1:]:
        needed |= expand(extra, project["optional-dependencies"])
    print("\n".join(sorted(needed)))


if __name__ == "__main__":
    main()
