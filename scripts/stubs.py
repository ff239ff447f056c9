"""Write src/poolweave/_core.pyi from the built extension, or with --check fail where it differs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

STUB = Path(__file__).parent.parent / "src" / "poolweave" / "_core.pyi"


def generate() -> str:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "_core.pyi"
        subprocess.run(
            [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "poolweave._core", "-o", str(out)],
            check=True,
        )
        ruff = [sys.executable, "-m", "ruff"]
        subprocess.run([*ruff, "check", "-q", "--fix-only", "--select", "I,UP,F401", str(out)], check=True)
        subprocess.run([*ruff, "format", "-q", str(out)], check=True)
        return out.read_text()


def main() -> int:
    fresh = generate()
    if "--check" not in sys.argv:
        STUB.write_text(fresh)
        return 0
    if STUB.exists() and STUB.read_text() == fresh:
        return 0
    print(f"{STUB.name} differs from the built extension: run `make stubs` and commit it", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
