"""The Python of the README and of the pages in docs/ runs as it stands, each block by itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHOLE = ["README.md", "docs/mempool.md", "docs/scheduler.md", "docs/simulator.md"]  # pages of which every block runs
PRINTS = {
    ("docs/index.md", 0): "turn 1 reuses 0 tokens\nturn 2 reuses 240 tokens\n",
    ("docs/mempool.md", 1): "0 of 40 tokens reused, 32 indexed\n32 of 70 tokens reused, 64 indexed\n",
}


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def lines(example: str) -> int:
    return sum(1 for line in example.splitlines() if line.strip())


@pytest.mark.parametrize("page", WHOLE)
def test_every_example_of_a_page_runs(page: str) -> None:
    assert examples(page)
    for example in examples(page):
        exec(compile(example, page, "exec"), {})


@pytest.mark.parametrize(("page", "number"), PRINTS)
def test_an_example_prints_what_its_page_says(page: str, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(examples(page)[number], page, "exec"), {})
    assert capsys.readouterr().out == PRINTS[page, number]


def test_the_first_uses_are_short() -> None:
    (pool,) = examples("README.md")
    assert lines(pool) <= 20
    assert lines(examples("docs/index.md")[0]) <= 30
