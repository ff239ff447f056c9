"""The index's page in docs/ runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "index.md"


@pytest.mark.multiproc
def test_the_example_of_the_page_runs() -> None:
    example = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[0]
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True)
    assert done.stdout == "turn 1 reuses 0 tokens\nturn 2 reuses 240 tokens\n"
    assert sum(1 for line in example.splitlines() if line.strip()) <= 30
