"""The examples of the documentation pages run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["scheduler.md", "simulator.md"])
def test_examples_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, page, "exec"), {})
    assert "Traceback" not in capsys.readouterr().err
